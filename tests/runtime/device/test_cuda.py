"""The CUDA device over a runtime made of names: what it calls, what it gives back, and captures that are
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.missing import need

from mars_export import SessionError
from mars_export.runtime import machine
from mars_export.runtime.device import cuda
from mars_export.runtime.device.cuda import Device
from mars_export.runtime.device.failures import LASTING, is_lasting

GOOD, BAD = SimpleNamespace(name="cudaSuccess"), SimpleNamespace(name="cudaErrorStreamCaptureUnsupported")
ILLEGAL = SimpleNamespace(name="cudaErrorIllegalAddress")
OLD_DRIVER, NO_DEVICE = (
    SimpleNamespace(name="cudaErrorInsufficientDriver"),
    SimpleNamespace(name="cudaErrorNoDevice"),
)
GRAPH, LAUNCHABLE = 5, 6


ANSWERS = {
    "cudaStreamCreateWithPriority": (77,),
    "cudaDeviceGetAttribute": (0,),
    "cudaMemGetInfo": (80, 100),
    "cudaStreamEndCapture": (GRAPH,),
    "cudaGraphInstantiate": (LAUNCHABLE,),
}


class FakeRuntime:
    """cuda.bindings.runtime: every call is noted and succeeds, unless its name is in `bad`."""

    cudaError_t = SimpleNamespace(
        cudaSuccess=GOOD, cudaErrorInsufficientDriver=OLD_DRIVER, cudaErrorNoDevice=NO_DEVICE
    )
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal="thread")
    cudaStreamNonBlocking = 1
    cudaDeviceAttr = SimpleNamespace(cudaDevAttrIntegrated=18)
    cudaHostAllocDefault = 0
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDeviceToDevice="on the device")

    def __init__(self, *bad: str) -> None:
        self.bad, self.calls, self.next = bad, [], 256  # type: ignore[var-annotated]
        self.error, self.current, self.host = BAD, 0, 0

    def cudaMemcpy3DParms(self) -> SimpleNamespace:
        return SimpleNamespace()

    def make_cudaPitchedPtr(self, *sizes: int) -> tuple[int, ...]:
        return sizes

    def make_cudaExtent(self, *sizes: int) -> tuple[int, ...]:
        return sizes

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name == "cudaGetErrorString":
                return GOOD, b"operation not supported"
            if name == "cudaMalloc":
                self.next += 256
                return (GOOD, self.next) if name not in self.bad else (BAD, None)
            if name == "cudaHostAlloc" and name not in self.bad:
                return GOOD, self.host
            if name == "cudaGetDevice" and name not in self.bad:
                return GOOD, self.current
            if name == "cudaSetDevice":
                self.current = arguments[0]
            values = ANSWERS.get(name, ())
            if name in self.bad and isinstance(self.error, Exception):
                raise self.error
            return (self.error, *(None for _ in values)) if name in self.bad else (GOOD, *values)

        return call

    def names(self) -> list[str]:
        """What was called, but for the asking which GPU is current."""
        return [name for name, *_ in self.calls if name != "cudaGetDevice"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Device, FakeRuntime]]:
    def device(*bad: str) -> tuple[Device, FakeRuntime]:
        runtime = FakeRuntime(*bad)
        monkeypatch.setattr(cuda, "_runtime", lambda: runtime)
        return Device(), runtime

    return device


def test_a_stream_of_the_callers_is_used_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    monkeypatch.setattr(cuda, "_runtime", lambda: runtime)
    assert Device(0, stream=123).stream == 123
    device = Device(0, stream=123)
    device.close()
    assert not {"cudaStreamDestroy", "cudaStreamCreateWithPriority"} & set(runtime.names())
    Device(0, priority=-2)
    assert runtime.calls[-1] == ("cudaStreamCreateWithPriority", FakeRuntime.cudaStreamNonBlocking, -2)


def test_a_gpu_that_shares_the_systems_memory_asks_the_system_first(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ANSWERS, "cudaDeviceGetAttribute", (1,))
    monkeypatch.setattr(machine, "available", lambda: 5 << 20)
    device, runtime = opened()
    with pytest.raises(SessionError, match="this GPU's memory takes 10 MB, 5 MB are free"):
        device.allocate(10 << 20)
    assert "cudaMalloc" not in runtime.names()
    assert device.free_memory() == 5 << 20
    device.allocate(1 << 20)


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


def test_page_locked_memory_goes_with_the_device(opened: Any) -> None:
    device, runtime = opened()
    memory = np.zeros(300, np.uint8)
    runtime.host = int(memory.ctypes.data)
    locked = device.pinned(300)
    locked[:] = 7
    assert (memory == 7).all()
    assert ("cudaHostAlloc", 300, FakeRuntime.cudaHostAllocDefault) in runtime.calls
    device.close()
    assert [c for c in runtime.calls if c[0] == "cudaFreeHost"] == [("cudaFreeHost", runtime.host)]
    assert runtime.names()[-1] == "cudaStreamDestroy"


def test_a_capture_becomes_a_graph(opened: Any) -> None:
    device, runtime = opened()
    assert device.capture(lambda: True) == LAUNCHABLE
    assert runtime.names()[-4:] == [
        "cudaStreamBeginCapture",
        "cudaStreamEndCapture",
        "cudaGraphInstantiate",
        "cudaGraphDestroy",
    ]


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
    device, runtime = opened("cudaMalloc")
    with pytest.raises(SessionError, match="CUDA: cudaMalloc failed: operation not supported"):
        device.allocate(10)
    runtime.calls.clear()
    with pytest.raises(SessionError):
        device.allocate(10)
    assert "cudaGetLastError" in runtime.names(), "TensorRT must not find it after a launch of its own"


def test_an_error_that_stays_says_what_to_do_and_closes_quietly(opened: Any) -> None:
    device, runtime = opened()
    runtime.bad, runtime.error = ("cudaStreamSynchronize", "cudaFree"), ILLEGAL
    for _ in range(2):
        with pytest.raises(
            SessionError, match=r"\(cudaErrorIllegalAddress\); this process cannot use the GPU .* restart it"
        ):
            device.synchronize()
    device.close()
    runtime.bad = ("cudaGetDevice",)
    for _ in range(2):  # the turn is not kept
        with pytest.raises(SessionError, match="cudaGetDevice failed"), device.lock:
            pass
    device.close()


def test_a_turn_makes_the_gpu_current_and_leaves_the_threads_own_choice(opened: Any) -> None:
    device, runtime = opened()
    runtime.current = 2
    with device.lock:
        assert runtime.current == 0
        with device.lock:
            assert runtime.current == 0
        assert runtime.current == 0
    assert runtime.current == 2
    with pytest.raises(ValueError, match="mine"), device.lock:
        raise ValueError("mine")
    assert runtime.current == 2
    runtime.calls.clear()
    device.close()
    assert runtime.current == 2
    assert runtime.names()[0] == "cudaSetDevice"
    runtime.current = 0
    runtime.calls.clear()
    with device.lock:
        pass
    assert runtime.names() == [], "nothing is set where it is the one already"


def test_a_gpu_is_named_by_its_number(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, runtime = opened()
    device = Device(1)
    with device.lock:
        assert runtime.current == 1
        device.allocate(10)
    assert runtime.current == 0
    runtime.calls.clear()
    device.close()
    assert ("cudaSetDevice", 1) in runtime.calls and runtime.current == 0
    monkeypatch.setitem(ANSWERS, "cudaGetDeviceCount", (2,))
    monkeypatch.setitem(ANSWERS, "cudaGetDeviceProperties", (SimpleNamespace(name=b"A", major=8, minor=6),))
    monkeypatch.setitem(ANSWERS, "cudaDriverGetVersion", (12090,))
    monkeypatch.setitem(ANSWERS, "cudaMemGetInfo", (10, 30))
    assert cuda.find_gpu(1) == cuda.Gpu("A", "sm86", "12.9")
    assert ("cudaGetDeviceProperties", 1) in runtime.calls
    assert str(cuda.find_gpu(2)).startswith("no GPU 2 is visible: the last of 2 is 1")
    runtime.calls.clear()
    assert cuda.memory_free(1) == 10
    assert runtime.calls.index(("cudaSetDevice", 1)) < runtime.calls.index(("cudaMemGetInfo",))
    assert runtime.current == 0
    monkeypatch.setitem(ANSWERS, "cudaDeviceGetAttribute", (1,))
    assert cuda.find_gpu(1) == cuda.Gpu("A", "sm86", "12.9", is_integrated=True)


@pytest.mark.parametrize(
    ("error", "driver", "message"),
    [
        (OLD_DRIVER, 12060, "the cuda-bindings are for CUDA 13.5, this driver is for CUDA 12.6; pip install"),
        (OLD_DRIVER, 0, "no NVIDIA GPU with a working driver"),
        (NO_DEVICE, 12060, "no NVIDIA GPU with a working driver"),
        (RuntimeError("Failed to dlopen libcuda.so.1"), 0, "no NVIDIA GPU with a working driver"),
    ],
)
def test_a_driver_that_is_older_than_the_bindings_is_named(
    error: Any, driver: int, message: str, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, runtime = opened()
    runtime.bad, runtime.error = ("cudaGetDeviceCount",), error
    monkeypatch.setitem(ANSWERS, "cudaDriverGetVersion", (driver,))
    monkeypatch.setitem(ANSWERS, "cudaRuntimeGetVersion", (13050,))
    assert str(cuda.find_gpu()).startswith(message)


def test_the_real_bindings_take_what_a_copy_says() -> None:
    need("cuda.bindings.runtime", "rtx")
    from cuda.bindings import runtime as real

    copy = real.cudaMemcpy3DParms()
    copy.dstPtr, copy.srcPtr = (
        real.make_cudaPitchedPtr(4096, 64, 64, 7),
        real.make_cudaPitchedPtr(8192, 32, 32, 5),
    )
    copy.extent, copy.kind = real.make_cudaExtent(16, 3, 2), real.cudaMemcpyKind.cudaMemcpyDeviceToDevice
    assert (int(copy.dstPtr.ptr), copy.dstPtr.pitch, copy.dstPtr.ysize) == (4096, 64, 7)
    assert (copy.extent.width, copy.extent.height, copy.extent.depth) == (16, 3, 2)
    known = {error.name for error in real.cudaError_t}
    assert known >= {"cudaErrorIllegalAddress", "cudaErrorAssert", "cudaErrorLaunchFailure"}
    # Those that the bindings' own words call lasting; newer ones than ours would be missed here.
    words = {e.name for e in real.cudaError_t if "inconsistent state" in " ".join((e.__doc__ or "").split())}
    assert words <= LASTING.keys()


def test_what_stays_is_known_by_name_and_by_number() -> None:
    need("cuda.bindings.runtime", "rtx")
    from cuda.bindings import runtime

    assert {name: int(getattr(runtime.cudaError_t, name)) for name in LASTING} == LASTING
    said = "Non-zero status code returned while running Attention node. CUDA failure 700: an illegal memory"
    assert is_lasting(said)
    assert is_lasting("CUDA error 719 at ...")
    assert is_lasting("cudaErrorLaunchFailure:unspecified launch failure")
    for other in ("CUDA failure 2: out of memory ; GPU=0", "a graph of 700 nodes", "CUDA failure 7001: x"):
        assert not is_lasting(other)
