"""Names of devices: what they mean, what is refused, and that a number arrives where it counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fixtures import Named

from mars_export.runtime import Session, SessionError
from mars_export.runtime.device import cuda, trt, variants
from mars_export.runtime.device.name import DeviceName
from mars_export.runtime.device.ort_memory import OrtMemory


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
    name = DeviceName.of(text)
    assert (name.kind, name.ordinal, str(name)) == (kind, ordinal, plain)
    assert (name.number is None) == (":" not in text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tpu", r"unknown device `tpu` \(known: cpu, cuda\)"),
        ("tpu:1", "unknown device"),
        ("", "unknown device"),
        ("cpu:0", "`cpu:0`: the CPU has no number; give cpu"),
        *((f"cuda:{number}", "behind the colon stands a GPU's number") for number in ("", "x", "-1", " 1")),
        *(
            (f"cuda:{number}", "behind the colon stands a GPU's number")
            for number in ("1:2", "1.0", "9" * 30)
        ),
        ("cuda:\u0661", "behind the colon stands a GPU's number"),
    ],
)
def test_refusals(text: str, words: str, bundles: Named) -> None:
    with pytest.raises(SessionError, match=words):
        DeviceName.of(text)
    with pytest.raises(SessionError, match=words):
        Session.open(bundles("llama"), text)


def test_an_engine_is_judged_by_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def find_gpu(number: int) -> str:
        asked.append(number)
        return "nobody is here"

    monkeypatch.setattr(cuda, "find_gpu", find_gpu)
    assert variants.look_around(3).no_gpu == "nobody is here"
    assert asked == [3]


def test_an_engine_is_opened_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen(Exception):
        """Ends the opening once the device is there."""

    def device(number: int) -> Any:
        raise Seen(number)

    monkeypatch.setattr(cuda, "Device", device)
    with pytest.raises(Seen, match="^2$"):
        trt.TrtBackend.of(SimpleNamespace(path=Path()), SimpleNamespace(), 2)  # type: ignore[arg-type]


def test_memory_of_a_gpu_is_its_own() -> None:
    """Every tensor and every copy of ONNX Runtime names the GPU, not only its provider."""
    asked: list[tuple[Any, ...]] = []

    class Value:
        def data_ptr(self) -> int:
            return 256

        def shape(self) -> list[int]:
            return [1, 1, 1, 4]

    class Values:
        @staticmethod
        def ortvalue_from_shape_and_type(_shape: Any, _dtype: Any, device: str, number: int) -> Value:
            asked.append((device, number))
            return Value()

        @staticmethod
        def ortvalue_from_numpy(_array: Any, device: str, number: int) -> Value:
            asked.append((device, number))
            return Value()

    class Binding:
        def bind_cpu_input(self, *_: Any) -> None:
            pass

        def bind_input(self, _name: str, device: str, number: int, *_: Any) -> None:
            asked.append((device, number))

        bind_output = bind_input

    class Inference:
        def __init__(self, _graph: bytes, _options: Any, providers: Any, **_: Any) -> None:
            asked.append(("providers", providers))

        def io_binding(self) -> Binding:
            return Binding()

        def run_with_iobinding(self, _binding: Binding) -> None:
            pass

    ort = SimpleNamespace(OrtValue=Values, SessionOptions=SimpleNamespace, InferenceSession=Inference)
    memory = OrtMemory(ort, "cuda", "CUDAExecutionProvider", 2)
    assert (memory.device, memory.number) == ("cuda", 2)
    memory.tensor((1,), np.dtype(np.int64))
    memory.bring([np.zeros(3, np.float32)])
    memory.zeros(1, (1, 1, 8, 4), np.dtype(np.float32))
    providers = [what for kind, what in asked if kind == "providers"]
    assert providers == [[("CUDAExecutionProvider", {"device_id": "2"})]]
    assert {each for each in asked if each[0] != "providers"} == {("cuda", 2)}
