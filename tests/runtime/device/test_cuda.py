"""The CUDA device over a runtime made of names: what it calls, what it gives back, and captures that are
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mars_export.runtime import SessionError
from mars_export.runtime.device import cuda
from mars_export.runtime.device.cuda import Device

GOOD, BAD = SimpleNamespace(name="cudaSuccess"), SimpleNamespace(name="cudaErrorStreamCaptureUnsupported")
GRAPH, LAUNCHABLE = 5, 6


ANSWERS = {
    "cudaStreamCreateWithFlags": (77,),
    "cudaStreamEndCapture": (GRAPH,),
    "cudaGraphInstantiate": (LAUNCHABLE,),
}


class FakeRuntime:
    """cuda.bindings.runtime: every call is noted and succeeds, unless its name is in `bad`."""

    cudaError_t = SimpleNamespace(cudaSuccess=GOOD, cudaErrorInsufficientDriver=None, cudaErrorNoDevice=None)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal="thread")
    cudaStreamNonBlocking = 1

    def __init__(self, *bad: str) -> None:
        self.bad, self.calls, self.next = bad, [], 256  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name == "cudaGetErrorString":
                return GOOD, b"operation not supported"
            if name == "cudaMalloc":
                self.next += 256
                return (GOOD, self.next) if name not in self.bad else (BAD, None)
            values = ANSWERS.get(name, ())
            return (BAD, *(None for _ in values)) if name in self.bad else (GOOD, *values)

        return call

    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Device, FakeRuntime]]:
    def device(*bad: str) -> tuple[Device, FakeRuntime]:
        runtime = FakeRuntime(*bad)
        monkeypatch.setattr(cuda, "_runtime", lambda: runtime)
        return Device(), runtime

    return device


def test_the_stream_does_not_wait_for_the_default_one(opened: Any) -> None:
    device, runtime = opened()
    assert runtime.calls == [("cudaStreamCreateWithFlags", FakeRuntime.cudaStreamNonBlocking)]
    assert device.stream == 77


def test_memory_is_given_back_once_and_after_the_stream(opened: Any) -> None:
    device, runtime = opened()
    first, second, third = (device.allocate(size) for size in (0, 10, 1000))
    assert [c for c in runtime.calls if c[0] == "cudaMalloc"] == [("cudaMalloc", n) for n in (256, 256, 1000)]
    runtime.calls.clear()
    device.free(second)
    assert runtime.names() == ["cudaStreamSynchronize", "cudaFree"]
    device.close()
    freed = sorted(c[1] for c in runtime.calls if c[0] == "cudaFree")
    assert freed == sorted((first, second, third))
    assert runtime.names()[-1] == "cudaStreamDestroy"


def test_a_capture_becomes_a_graph(opened: Any) -> None:
    device, runtime = opened()
    assert device.capture(lambda: True) == LAUNCHABLE
    assert runtime.names()[1:] == [
        "cudaStreamBeginCapture",
        "cudaStreamEndCapture",
        "cudaGraphInstantiate",
        "cudaGraphDestroy",
    ]


@pytest.mark.parametrize("bad", ["cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate"])
def test_a_driver_that_refuses_a_capture_leaks_nothing(bad: str, opened: Any) -> None:
    device, runtime = opened(bad)
    assert device.capture(lambda: True) is None
    assert runtime.names()[-1] == "cudaGetLastError", "the refusal is not the next call's failure"
    ended = "cudaStreamEndCapture" in runtime.names()
    assert ended == (bad != "cudaStreamBeginCapture")
    assert ("cudaGraphDestroy", GRAPH) in runtime.calls or bad != "cudaGraphInstantiate"


@pytest.mark.parametrize("how", ["refused", "raised"])
def test_what_cannot_be_enqueued_ends_its_capture(how: str, opened: Any) -> None:
    device, runtime = opened()

    def enqueue() -> bool:
        if how == "raised":
            raise SessionError("no")
        return False

    if how == "raised":
        with pytest.raises(SessionError, match="no"):
            device.capture(enqueue)
    else:
        assert device.capture(enqueue) is None
    assert runtime.names()[-2:] == ["cudaStreamEndCapture", "cudaGraphDestroy"]


def test_a_failing_call_is_named(opened: Any) -> None:
    device, _ = opened("cudaMalloc")
    with pytest.raises(SessionError, match="CUDA: cudaMalloc failed: operation not supported"):
        device.allocate(10)
