"""ONNX Runtime's own options at open: which half gets which, what is refused, and that they arrive."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from support.fixtures import Named

from mars_export import GenerationConfig, Session, SessionError
from mars_export.runtime.device.name import DeviceName
from mars_export.runtime.device.ort.library import LEVEL, load, split_options, version_and_devices

SPINNING = "session.intra_op.allow_spinning"
AFFINITIES = "session.intra_op_thread_affinities"


@pytest.mark.parametrize(
    ("cause", "raised", "words"),
    [
        (ModuleNotFoundError(), SessionError, "onnxruntime is not installed"),
        (OSError(), SessionError, "onnxruntime cannot be loaded: libcudart.so.13: no such file"),
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
        (SystemExit(143), SystemExit, "143"),
    ],
)
def test_a_library_that_is_not_loaded(
    cause: BaseException, raised: type[BaseException], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not there, or is damaged, or a signal arrives while it is loaded, which pybind11 hides."""

    def refuse(name: str, *_: Any) -> None:
        if name != "onnxruntime":
            return
        if isinstance(cause, ModuleNotFoundError):
            raise cause
        raise ImportError("libcudart.so.13: no such file") from cause

    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=refuse), *sys.meta_path])
    with pytest.raises(raised, match=words or None):
        load("cpu")
    if raised is SessionError:
        assert version_and_devices() is None


def test_names_with_a_dot_are_the_sessions() -> None:
    assert split_options({SPINNING: "0", "device_id": "1"}, DeviceName("cuda")) == (
        {SPINNING: "0"},
        {"device_id": "1"},
    )
    assert split_options({}, DeviceName("cpu")) == ({}, {})


def test_the_devices_number_is_its_device_id() -> None:
    second = DeviceName("cuda", 1)
    assert split_options({}, second) == ({}, {"device_id": "1"})
    assert split_options({"device_id": "1"}, second) == ({}, {"device_id": "1"})
    with pytest.raises(SessionError, match=r"number 1, but device_id is 2; give only the device"):
        split_options({"device_id": "2"}, second)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device_id": "1"}, "the CPU has no option device_id"),
        ({LEVEL: "0"}, "use accuracy_level"),
        ({SPINNING: 0}, f"options must map strings to strings, not '{SPINNING}': 0"),
        ({1: "0"}, "options must map strings to strings, not 1: '0'"),
    ],
)
def test_refusals(options: dict[Any, Any], words: str, bundles: Named) -> None:
    with pytest.raises(SessionError, match=words):
        split_options(options, DeviceName("cpu"))
    with pytest.raises(SessionError, match=words):
        Session.open(bundles("llama"), options=options)


def test_options_arrive_and_change_no_token(bundles: Named) -> None:
    config = GenerationConfig(max_new_tokens=16)
    plain = Session.open(bundles("llama"), threads=1).generate([5, 9, 200], config)
    quiet = Session.open(bundles("llama"), threads=2, options={SPINNING: "0"})
    assert quiet.generate([5, 9, 200], config).token_ids == plain.token_ids
    with pytest.raises(SessionError, match="ONNX Runtime cannot load the graph"):
        Session.open(bundles("llama"), threads=2, options={AFFINITIES: "nonsense"})
