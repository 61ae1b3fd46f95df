"""Opening a session on a GPU provider of ONNX Runtime: settings, operators that stay on the CPU, refusals.

The provider is pretended: sessions compute on the CPU, in a fake GPU's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fake_ort_cuda import FakeSession, pretend

from mars_export import Session, SessionError
from mars_export.runtime.cli.doctor import examine
from mars_export.runtime.device.ort import library
from mars_export.runtime.device.ort.backend import OrtBackend
from mars_export.runtime.errors import MarsWarning

SMALL_NODES = (("Shape", "num_slots_1d"), ("Cos", "cos_raw"), ("Add", "positions"), ("Where", "rows_of_slot"))


def test_float32_is_not_rounded_to_tf32(
    graphs: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    fake = pretend(monkeypatch, *SMALL_NODES)
    session = Session.open(graphs("in-place", "fp32"), "cuda", cache_bytes=0)
    assert session.backend.on_cpu == {"Shape": 1, "Cos": 1, "Add": 1, "Where": 1}  # type: ignore[attr-defined]
    assert not recwarn.list, "operators on shapes and positions are small"
    Session.open(graphs("in-place", "fp32"), "cuda", cache_bytes=0, options={"use_tf32": "1"})
    Session.open(graphs("in-place", "fp32"), "cuda", cache_bytes=0, stream=123)
    assert [settings["use_tf32"] for settings in fake.options] == ["0", "1", "0"]
    assert [settings["user_compute_stream"] for settings in fake.options] == ["77"] * 3


@pytest.mark.parametrize(
    "node", [("Reshape", "layers.0.qkv_heads"), ("Add", "allowed"), ("MatMul", ""), ("Where", "")]
)
def test_operators_on_hidden_states_that_are_left_to_the_cpu_are_told(
    node: tuple[str, str], graphs: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, *SMALL_NODES, node, node)
    words = rf"leaves 2 operators on hidden states to the CPU \(2 {node[0]}\): up to 4 copies"
    with pytest.warns(MarsWarning, match=words):
        Session.open(graphs("in-place", "fp32"), "cuda", cache_bytes=0)
    with pytest.raises(SessionError, match=words):
        Session.open(graphs("in-place", "fp32"), "cuda", cache_bytes=0, strict=True)


@pytest.mark.parametrize(
    ("known", "plugins", "has_library", "expected"),
    [
        (["CUDAExecutionProvider"], [], False, "CUDAExecutionProvider"),
        ([], ["CudaPluginExecutionProvider"], False, "CudaPluginExecutionProvider"),
        ([], [], True, "CudaPluginExecutionProvider"),
        (["AzureExecutionProvider"], [], False, None),
    ],
)
def test_both_names_of_cuda_are_known(
    known: list[str], plugins: list[str], has_library: bool, expected: str | None, tmp_path: Path
) -> None:
    (tmp_path / "capi").mkdir()
    if has_library:
        (tmp_path / "capi" / library.CUDA_PLUGIN).touch()
    devices = [SimpleNamespace(ep_name=name) for name in plugins]
    module = SimpleNamespace(
        __file__=str(tmp_path / "__init__.py"),
        get_available_providers=lambda: known,
        get_ep_devices=lambda: devices,
        register_execution_provider_library=lambda name, _: devices.append(SimpleNamespace(ep_name=name)),
    )
    assert library.provider_of(module, "cuda") == expected


def test_a_provider_that_does_not_start_is_an_error(
    graphs: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime itself would compute on the CPU and say so in its log only."""
    pretend(monkeypatch)
    monkeypatch.setattr(FakeSession, "get_providers", lambda self: ["AnotherProvider"])
    with pytest.raises(
        SessionError, match="could not start CUDAExecutionProvider and would compute on the CPU"
    ):
        Session.open(graphs("in-place", "fp32"), "cuda")


def test_doctor_says_what_is_left_to_the_cpu(
    graphs: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = graphs("in-place", "fp32")
    details = [f.detail for f in examine(bundle) if f.subject == "variant model"]
    assert [detail.startswith("opens on cpu and decodes") for detail in details] == [True]
    assert "left to the CPU" not in details[0]
    left = property(lambda self: {"Shape": 2, "Gather": 1}, lambda *_: None)
    monkeypatch.setattr(OrtBackend, "on_cpu", left, raising=False)
    (detail,) = (f.detail for f in examine(bundle) if f.subject == "variant model")
    assert detail.endswith("; left to the CPU: 2 Shape, 1 Gather")
