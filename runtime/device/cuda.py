"""Device memory, copies, one stream and captured graphs, over cuda-python. The only file that names CUDA; it
knows no TensorRT.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import SessionError

INSTALL = "pip install cuda-bindings (version 12.x for a driver of CUDA 12, such as JetPack 6's)"


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU that would be used. `capability` such as `sm86`; `driver`: the newest CUDA it supports, such as
    `12.9`.
    """

    name: str
    capability: str
    driver: str


def find_gpu() -> Gpu | str:
    """The first GPU, or one sentence that says why there is none."""
    try:
        runtime = _runtime()
        (count,) = _checked(runtime, "cudaGetDeviceCount")
        if count == 0:
            return "no NVIDIA GPU is visible"
        (properties,) = _checked(runtime, "cudaGetDeviceProperties", 0)
        (driver,) = _checked(runtime, "cudaDriverGetVersion")
    except SessionError as error:
        return str(error)
    name = (
        properties.name.decode("utf-8", "replace").rstrip("\0")
        if isinstance(properties.name, bytes)
        else str(properties.name)
    )
    return Gpu(name, f"sm{properties.major}{properties.minor}", f"{driver // 1000}.{driver % 1000 // 10}")


def memory_used() -> int | None:
    """Bytes in use on the GPU, by all processes; None where it cannot be asked."""
    try:
        free, total = _checked(_runtime(), "cudaMemGetInfo")
    except SessionError:
        return None
    return int(total) - int(free)


class Device:
    """A GPU, one stream on it, and everything that is ordered on that stream. Addresses are plain integers.

    Nothing here is thread-safe; the backend holds a lock. Raises SessionError that names the failing call.
    """

    def __init__(self) -> None:
        self._cuda = _runtime()
        # Not ordered with the default stream, whose work by others would break a capture.
        (self.stream,) = self._call("cudaStreamCreateWithFlags", self._cuda.cudaStreamNonBlocking)
        self._allocations: set[int] = set()

    def allocate(self, num_bytes: int) -> int:
        """Device memory, zeroed: what is masked out still meets a zero weight, and 0 * NaN is NaN."""
        # Never null: an empty tensor too needs an address.
        (address,) = self._call("cudaMalloc", max(num_bytes, 256))
        self._allocations.add(int(address))
        self.zero(int(address), max(num_bytes, 256))
        return int(address)

    def free(self, address: int) -> None:
        """Give memory back, after what is on the stream."""
        self.synchronize()
        self._allocations.remove(address)
        self._call("cudaFree", address)

    def close(self) -> None:
        """Give everything back, after what is on the stream. The device must not be used again."""
        self.synchronize()
        while self._allocations:
            self._call("cudaFree", self._allocations.pop())
        self._call("cudaStreamDestroy", self.stream)

    def zero(self, address: int, num_bytes: int) -> None:
        self._call("cudaMemsetAsync", address, 0, num_bytes, self.stream)

    def upload(self, address: int, array: np.ndarray) -> None:
        """Copy a contiguous host array to `address`; the array may be reused after `synchronize`."""
        self._call(
            "cudaMemcpyAsync",
            address,
            array.ctypes.data,
            array.nbytes,
            self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice,
            self.stream,
        )

    def download(self, array: np.ndarray, address: int) -> None:
        """Fill a contiguous host array from `address`; it is complete after `synchronize`."""
        self._call(
            "cudaMemcpyAsync",
            array.ctypes.data,
            address,
            array.nbytes,
            self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost,
            self.stream,
        )

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int
    ) -> None:
        """Copy `height` runs of `width` bytes on the device; the pitches are the distances between runs, in
        bytes.
        """
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._call(
            "cudaMemcpy2DAsync", target, target_pitch, source, source_pitch, width, height, kind, self.stream
        )

    def synchronize(self) -> None:
        self._call("cudaStreamSynchronize", self.stream)

    def capture(self, enqueue: Callable[[], bool]) -> Any | None:
        """A graph of what `enqueue` puts on the stream, without running it; None if it cannot be captured."""
        cuda, done, launchable = self._cuda, False, None
        mode = cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        if cuda.cudaStreamBeginCapture(self.stream, mode)[0] != cuda.cudaError_t.cudaSuccess:
            cuda.cudaGetLastError()  # the refusal is an answer, not a failure of the next call
            return None
        try:
            done = enqueue()
        finally:
            # Ends the capture even when it was refused; only then is the stream usable again.
            error, graph = cuda.cudaStreamEndCapture(self.stream)
            if done and error == cuda.cudaError_t.cudaSuccess:
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


def _runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise SessionError(f"cuda-python is not installed; {INSTALL}") from error
    return runtime


def _checked(runtime: Any, name: str, *arguments: Any) -> tuple[Any, ...]:
    error, *values = getattr(runtime, name)(*arguments)
    if error == runtime.cudaError_t.cudaSuccess:
        return tuple(values)
    if error in (runtime.cudaError_t.cudaErrorInsufficientDriver, runtime.cudaError_t.cudaErrorNoDevice):
        raise SessionError("no NVIDIA GPU with a working driver is here (check with nvidia-smi)")
    _, text = runtime.cudaGetErrorString(error)
    words = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
    raise SessionError(f"CUDA: {name} failed: {words} ({error.name})")
