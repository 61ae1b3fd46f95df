"""Names of devices: what they mean, what is refused, and that a number arrives where it counts."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from support.fixtures import Named

from mars_export import Session, SessionError
from mars_export.runtime.device import cuda, variants
from mars_export.runtime.device.name import DeviceName
from mars_export.runtime.device.trt import backend as trt


@pytest.mark.parametrize(
    ("text", "kind", "ordinal", "plain"),
    [
        ("cpu", "cpu", 0, "cpu"),
        ("cuda", "cuda", 0, "cuda"),
        ("cuda:0", "cuda", 0, "cuda"),
        ("cuda:1", "cuda", 1, "cuda:1"),
        ("cuda:07", "cuda", 7, "cuda:7"),
    ],
)
def test_names(text: str, kind: str, ordinal: int, plain: str) -> None:
    name = DeviceName.parse(text)
    assert (name.kind, name.ordinal, str(name)) == (kind, ordinal, plain)
    assert (name.number is None) == (":" not in text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tpu", r"unknown device `tpu` \(known: cpu, cuda\)"),
        ("tpu:1", "unknown device"),
        ("", "unknown device"),
        ("cpu:0", "`cpu:0`: the CPU has no number; give cpu"),
        *(
            (f"cuda:{number}", "the part after the colon must be a GPU number")
            for number in ("", "x", "-1", " 1", "1:2", "1.0", "9" * 30, "\u0661")
        ),
    ],
)
def test_refusals(text: str, words: str, bundles: Named) -> None:
    with pytest.raises(SessionError, match=words):
        DeviceName.parse(text)
    with pytest.raises(SessionError, match=words):
        Session.open(bundles("llama"), text)


def test_an_engine_is_judged_by_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def find_gpu(number: int) -> str:
        asked.append(number)
        return "nobody is here"

    monkeypatch.setattr(cuda, "find_gpu", find_gpu)
    assert variants.inspect_host(3).no_gpu == "nobody is here"
    assert asked == [3]


def test_an_engine_is_opened_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen(Exception):
        """Ends the opening once the device is there."""

    def device(number: int, *_: Any) -> Any:
        raise Seen(number)

    monkeypatch.setattr(cuda, "Device", device)
    with pytest.raises(Seen, match="^2$"):
        trt.TrtBackend.open(SimpleNamespace(path=Path()), SimpleNamespace(), 2)  # type: ignore[arg-type]


def test_an_engine_that_does_not_open_leaves_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        lock, closed = nullcontext(), 0

        def close(self) -> None:
            self.closed += 1

    made = Device()
    monkeypatch.setattr(cuda, "Device", lambda *_: made)
    monkeypatch.setattr(trt.LoadedEngine, "load", Mock(side_effect=SessionError("it does not open")))
    with pytest.raises(SessionError, match="it does not open"):
        trt.TrtBackend.open(SimpleNamespace(path=Path()), SimpleNamespace(), 2)  # type: ignore[arg-type]
    assert made.closed == 1
