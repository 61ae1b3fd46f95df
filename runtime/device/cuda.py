"""CUDA by cuda-python: device memory, copies, one stream, captured graphs. No other file imports it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import c_ubyte
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import machine
from ..errors import DeviceLost, SessionError
from ..machine import require
from .failures import LASTING, RESTART

INSTALL = (
    "pip install 'cuda-bindings<13' for a driver of CUDA 12, 'cuda-bindings>=13' for one of CUDA 13,"
    " 'mars-export[jetson]' on a Jetson"
)
NO_DRIVER = "no NVIDIA GPU with a working driver was found (check with nvidia-smi)"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. `capability` such as `sm86`; `driver`: the newest CUDA version that it supports, such as
    `12.9`; `is_integrated`: its memory is the system's, as on a Jetson.
    """

    name: str
    capability: str
    driver: str
    is_integrated: bool = False


def find_gpu(number: int = 0) -> Gpu | str:
    """The GPU of that number in CUDA_VISIBLE_DEVICES, or one sentence that says why there is none."""
    try:
        runtime = _runtime()
        (count,) = _checked(runtime, "cudaGetDeviceCount")
        if count == 0:
            return "no NVIDIA GPU is visible"
        if number >= count:
            return (
                f"no GPU {number} is visible: the last of {count} is {count - 1} (CUDA_VISIBLE_DEVICES,"
                " nvidia-smi)"
            )
        (properties,) = _checked(runtime, "cudaGetDeviceProperties", number)
        (driver,) = _checked(runtime, "cudaDriverGetVersion")
        is_integrated = _is_integrated(runtime, number)
    except SessionError as error:
        return str(error)
    name = _text(properties.name).rstrip("\0")
    return Gpu(name, f"sm{properties.major}{properties.minor}", _version(driver), is_integrated)


def memory_free(number: int = 0) -> int | None:
    """Bytes that may still be allocated on a GPU; None if unknown."""
    try:
        runtime = _runtime()
        with GpuLock(runtime, number):
            return _free(runtime, number)
    except SessionError:
        return None


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of bytes, `pitch` bytes apart, and `per_slice` pitches from one slice to the next."""

    address: int
    pitch: int
    per_slice: int


class GpuLock:
    """A context in which one thread uses a GPU, which is the thread's current GPU meanwhile.

    Each thread has a current GPU, from which its memory comes, and a stream of another GPU refuses its work.
    """

    def __init__(self, runtime: Any, number: int = 0) -> None:
        self._cuda, self._number, self._lock = runtime, number, threading.RLock()
        self._previous: list[int] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            (current,) = _checked(self._cuda, "cudaGetDevice")
            if current != self._number:
                _checked(self._cuda, "cudaSetDevice", self._number)
            self._previous.append(current)
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        previous = self._previous.pop()
        if previous != self._number:
            self._cuda.cudaSetDevice(previous)
        self._lock.release()


class Device:
    """A GPU with one stream, and the memory, copies and graphs on that stream. Addresses are integers.

    `stream` is a cudaStream_t of the caller's, which outlives this; None creates one of that `priority`
    (lower numbers go first). Callers hold `lock`. Raises SessionError that names the failing call.
    """

    def __init__(self, number: int = 0, stream: int | None = None, priority: int = 0) -> None:
        self._cuda, self._number = _runtime(), number
        self.lock = GpuLock(self._cuda, number)
        self._allocations: set[int] = set()
        self._pinned: list[int] = []
        with self.lock:
            self._is_integrated = _is_integrated(self._cuda, number)
            self._owns_stream = stream is None
            if stream is None:
                # Not ordered with the default stream, whose work from other code would break a capture.
                flags = self._cuda.cudaStreamNonBlocking
                (self.stream,) = self._call("cudaStreamCreateWithPriority", flags, priority)
            else:
                self.stream = stream

    def free_memory(self) -> int:
        """Bytes that may still be allocated."""
        return _free(self._cuda, self._number)

    def require(self, num_bytes: int) -> None:
        """Raise SessionError if a GPU that shares the system's memory has less. CUDA would not refuse; the
        system would kill the process.
        """
        if self._is_integrated:
            require(num_bytes, "this GPU's memory", "shorten the prompt, or run fewer rows at once")

    def allocate(self, num_bytes: int) -> int:
        """Zeroed device memory: masked values are multiplied by 0, and 0 * NaN is NaN."""
        self.require(num_bytes)
        # Never 0 bytes: an empty tensor needs an address, too.
        (address,) = self._call("cudaMalloc", max(num_bytes, 256))
        self._allocations.add(int(address))
        self.zero(int(address), max(num_bytes, 256))
        return int(address)

    def pinned(self, num_bytes: int) -> np.ndarray:
        """Page-locked host memory as bytes, so that copies do not wait. It is freed with the device."""
        (address,) = self._call("cudaHostAlloc", max(num_bytes, 1), self._cuda.cudaHostAllocDefault)
        self._pinned.append(int(address))
        return np.ctypeslib.as_array((c_ubyte * num_bytes).from_address(int(address)))

    def free(self, address: int) -> None:
        """Free memory, after the work on the stream."""
        self.synchronize()
        self._allocations.remove(address)
        self._call("cudaFree", address)

    def close(self) -> None:
        """Free everything, after the work on the stream. The device must not be used again."""
        try:
            with self.lock:
                self.synchronize()
                while self._allocations:
                    self._call("cudaFree", self._allocations.pop())
                while self._pinned:
                    self._call("cudaFreeHost", self._pinned.pop())
                if self._owns_stream:
                    self._call("cudaStreamDestroy", self.stream)
        except SessionError:
            pass  # the GPU has failed: its memory is freed with the process

    def zero(self, address: int, num_bytes: int) -> None:
        self._call("cudaMemsetAsync", address, 0, num_bytes, self.stream)

    def upload(self, address: int, array: np.ndarray) -> None:
        """Copy a contiguous host array to `address`; the array may be reused after `synchronize`."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", address, array.ctypes.data, array.nbytes, kind, self.stream)

    def download(self, array: np.ndarray, address: int) -> None:
        """Fill a contiguous host array from `address`; it is complete after `synchronize`."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", array.ctypes.data, address, array.nbytes, kind, self.stream)

    def copy_runs(self, target: Runs, source: Runs, width: int, height: int, depth: int) -> None:
        """Copy `height` runs of `width` bytes in each of `depth` slices on the device, in one call. Source
        and target must not overlap.
        """
        cuda, copy = self._cuda, self._cuda.cudaMemcpy3DParms()
        copy.dstPtr = cuda.make_cudaPitchedPtr(target.address, target.pitch, target.pitch, target.per_slice)
        copy.srcPtr = cuda.make_cudaPitchedPtr(source.address, source.pitch, source.pitch, source.per_slice)
        copy.extent = cuda.make_cudaExtent(width, height, depth)
        copy.kind = cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._call("cudaMemcpy3DAsync", copy, self.stream)

    def synchronize(self) -> None:
        self._call("cudaStreamSynchronize", self.stream)

    def capture(self, enqueue: Callable[[], bool]) -> Any | None:
        """A graph of what `enqueue` puts on the stream, without running it; None if it cannot be captured."""
        cuda, is_enqueued, launchable = self._cuda, False, None
        mode = cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        if cuda.cudaStreamBeginCapture(self.stream, mode)[0] != cuda.cudaError_t.cudaSuccess:
            cuda.cudaGetLastError()  # clear the error, which the next call would report
            return None
        try:
            is_enqueued = enqueue()
        finally:
            # A refused capture must be ended too, before the stream can be used again.
            error, graph = cuda.cudaStreamEndCapture(self.stream)
            if is_enqueued and error == cuda.cudaError_t.cudaSuccess:
                error, launchable = cuda.cudaGraphInstantiate(graph, 0)
            if graph is not None and int(graph):
                cuda.cudaGraphDestroy(graph)
            if error != cuda.cudaError_t.cudaSuccess:
                cuda.cudaGetLastError()
                launchable = None
        return launchable

    def launch(self, graph: Any) -> None:
        self._call("cudaGraphLaunch", graph, self.stream)

    def forget(self, graph: Any) -> None:
        self._call("cudaGraphExecDestroy", graph)

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        return _checked(self._cuda, name, *arguments)


def _is_integrated(runtime: Any, number: int) -> bool:
    """Whether the GPU's memory is the system's, as on a Jetson."""
    attribute = runtime.cudaDeviceAttr.cudaDevAttrIntegrated
    return bool(_checked(runtime, "cudaDeviceGetAttribute", attribute, number)[0])


def _free(runtime: Any, number: int) -> int:
    free, _ = _checked(runtime, "cudaMemGetInfo")
    shared = machine.available() if _is_integrated(runtime, number) else None
    return int(free) if shared is None else shared


def _runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise SessionError(f"cuda-python is not installed; {INSTALL}") from error
    return runtime


def _checked(runtime: Any, name: str, *arguments: Any) -> tuple[Any, ...]:
    try:
        error, *values = getattr(runtime, name)(*arguments)
    except RuntimeError as missing:  # bindings of CUDA 12.6 without libcuda
        raise SessionError(NO_DRIVER) from missing
    if error == runtime.cudaError_t.cudaSuccess:
        return tuple(values)
    if error == runtime.cudaError_t.cudaErrorInsufficientDriver:
        (_, driver), (_, ours) = runtime.cudaDriverGetVersion(), runtime.cudaRuntimeGetVersion()
        if driver:  # 0 without a driver, which is the same error
            versions = f"CUDA {_version(ours)}, this driver is for CUDA {_version(driver)}"
            raise SessionError(f"the cuda-bindings are for {versions}; {INSTALL}")
        raise SessionError(NO_DRIVER)
    if error == runtime.cudaError_t.cudaErrorNoDevice:
        raise SessionError(NO_DRIVER)
    runtime.cudaGetLastError()  # clear it: TensorRT would report it after its own launch
    _, text = runtime.cudaGetErrorString(error)
    what = f"CUDA: {name} failed: {_text(text)} ({error.name})"
    if error.name in LASTING:
        raise DeviceLost(what + RESTART)
    raise SessionError(what)


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
