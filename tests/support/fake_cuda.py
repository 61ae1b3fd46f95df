"""A GPU made of numpy: addresses, strides, stream order and captured graphs are those of the real one.

It refuses what the real one refuses or punishes; runtime/cpp/tests/trt_stub/stub.hpp has the rules. Engines
are fake_engine.py's.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from mars_export.runtime.device.cuda import GpuLock, Runs
from mars_export.runtime.errors import DeviceLost, SessionError

ALIGNMENT = 256
Work = Callable[[], None]


@dataclass(slots=True)
class Graph:
    """A captured step: what it does, and what each context was bound to when it was captured."""

    work: list[Work] = field(default_factory=list)
    bound: list[tuple[Bound, int]] = field(default_factory=list)


@dataclass(slots=True)
class Bound:
    """What a context is bound to; `changes` counts the times that it was bound to something else."""

    range_index: int
    scratch: int
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)
    changes: int = 0
    is_alive: bool = True

    def end(self) -> None:
        self.is_alive = False


class FakeDevice:
    """One arena of bytes at real addresses, and one stream: what is put on it is done at `synchronize`."""

    def __init__(self, size: int = 1 << 20, refuse_capture: bool = False) -> None:
        # NaN and -1 everywhere: nothing may be read before it is written
        whole = np.full(size + ALIGNMENT, 0xFF, np.uint8)
        at = -whole.ctypes.data % ALIGNMENT
        self.memory = whole[at : at + size]
        self.base = self.memory.ctypes.data
        self.next, self.stream = self.base, 77
        self.events: list[tuple[str, int]] = []
        self.allocations: list[int] = []
        self.live: dict[int, int] = {}
        self.spare: list[int] = []  # addresses that were given back and are handed out again
        self.locked: list[np.ndarray] = []  # page-locked memory, which lives as long as the device
        self.left: int | None = None  # allocations before memory is out
        self.free_bytes = 1 << 40
        self.is_broken = False
        self.refuse_capture = refuse_capture
        self.recording: Graph | None = None
        self.queue: list[Work] = []
        self.graphs = self.launches = self.forgotten = self.closed = 0
        self.current = threading.local()  # which GPU is a thread's own affair
        good = SimpleNamespace(cudaSuccess=0)
        self.lock = GpuLock(
            SimpleNamespace(
                cudaError_t=good,
                cudaGetDevice=lambda: (0, getattr(self.current, "ordinal", 0)),
                cudaSetDevice=self._set_device,
            )
        )

    def allocate(self, num_bytes: int) -> int:
        self._call("cudaMalloc", in_capture=False)
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise SessionError("CUDA: cudaMalloc failed: out of memory (cudaErrorMemoryAllocation)")
        size = -(-max(num_bytes, 256) // ALIGNMENT) * ALIGNMENT
        if self.spare:
            address = self.spare.pop(0)
        else:
            address, self.next = self.next, self.next + size
        assert self.next <= self.base + len(self.memory), "the arena is full"
        self.allocations.append(num_bytes)
        self.live[address] = max(num_bytes, 256)
        self.zero(address, max(num_bytes, 256))
        return address

    def free_memory(self) -> int:
        return self.free_bytes

    def require(self, num_bytes: int) -> None:
        pass

    def pinned(self, num_bytes: int) -> np.ndarray:
        self._call("cudaHostAlloc", in_capture=False)
        self.locked.append(np.full(num_bytes, 0xFF, np.uint8))
        return self.locked[-1]

    def free(self, address: int) -> None:
        self._call("cudaFree", in_capture=False)
        self._flush()
        size = self.live.pop(address)
        self.memory[address - self.base : address - self.base + size] = 0xFF

    def close(self) -> None:
        assert self.is_broken or self.forgotten == self.graphs, (
            "graphs go before their contexts, and both before their memory"
        )
        self.closed += 1

    def zero(self, address: int, num_bytes: int) -> None:
        self._call("cudaMemsetAsync", in_capture=False)
        self.queue.append(lambda: self._bytes(address, num_bytes).fill(0))

    def upload(self, address: int, array: np.ndarray) -> None:
        self._call("cudaMemcpyAsync", in_capture=False)
        assert array.flags.c_contiguous
        held = self._held(array)

        def copy() -> None:
            host = held()
            assert host is not None, "a host array is gone before the stream has read it"
            self.events.append(("upload", host.nbytes))
            self._bytes(address, host.nbytes)[:] = host.reshape(-1).view(np.uint8)

        self.queue.append(copy)

    def download(self, array: np.ndarray, address: int) -> None:
        self._call("cudaMemcpyAsync", in_capture=False)
        held = self._held(array)

        def copy() -> None:
            host = held()
            assert host is not None, "a host array is gone before the stream has written it"
            self.events.append(("download", host.nbytes))
            host.reshape(-1).view(np.uint8)[:] = self._bytes(address, host.nbytes)

        self.queue.append(copy)

    def copy_runs(self, target: Runs, source: Runs, width: int, height: int, depth: int) -> None:
        self._call("cudaMemcpy3DAsync", in_capture=False)
        for runs in (target, source):
            assert width <= runs.pitch, "cudaErrorInvalidPitchValue"
            assert height <= runs.per_slice, "cudaErrorInvalidValue: slices overlap"

        def at(runs: Runs, y: int, z: int) -> np.ndarray:
            return self._bytes(runs.address + (z * runs.per_slice + y) * runs.pitch, width)

        def copy() -> None:
            self.events.append(("copy", width * height * depth))
            places = [(y, z) for z in range(depth) for y in range(height)]
            read = [at(source, *place).copy() for place in places]
            for place in places:
                at(target, *place)[:] = 0xEE
            assert all((at(source, *p) == r).all() for p, r in zip(places, read, strict=True)), "an overlap"
            for place, run in zip(places, read, strict=True):
                at(target, *place)[:] = run

        self.queue.append(copy)

    def _held(self, array: np.ndarray) -> Callable[[], np.ndarray | None]:
        """What the stream will find of a host array: memory of ours stays, whoever looks at it goes."""
        is_ours = any(array is one or array.base is one for one in self.locked)
        return (lambda: array) if is_ours else weakref.ref(array)

    def synchronize(self) -> None:
        self._call("cudaStreamSynchronize", in_capture=False)
        self._flush()
        self.events.append(("synchronize", 0))

    def capture(self, enqueue: Callable[[], bool]) -> Any | None:
        self._call("cudaStreamBeginCapture", in_capture=False)
        self.recording = Graph()
        try:
            done = enqueue()
        finally:
            recorded, self.recording = self.recording, None
        if self.refuse_capture or not done:
            return None
        self.graphs += 1
        return recorded

    def launch(self, graph: Graph) -> None:
        self._call("cudaGraphLaunch", in_capture=False)
        for bound, changes in graph.bound:
            assert bound.is_alive, "a graph is launched after its context is gone"
            assert bound.changes == changes, (
                "a graph is launched after its context was bound to something else"
            )
        self.launches += 1
        self.queue += graph.work

    def forget(self, graph: Graph) -> None:
        self._call("cudaGraphExecDestroy", in_capture=False)
        assert all(bound.is_alive for bound, _ in graph.bound), "a context is gone before its graph"
        self.forgotten += 1

    def enqueue(self, work: Work, bound: Bound) -> None:
        self._call("cudaLaunchKernel", in_capture=True)
        if self.recording is None:
            self.queue.append(work)
        else:
            self.recording.work.append(work)
            self.recording.bound.append((bound, bound.changes))

    def view(self, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """What is there when the stream has come to its end."""
        self._flush()
        return self.array(address, shape, dtype)

    def array(self, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._bytes(address, count).view(dtype).reshape(shape)

    def _flush(self) -> None:
        queue, self.queue = self.queue, []
        for work in queue:
            work()

    def _bytes(self, address: int, count: int) -> np.ndarray:
        inside = any(
            start <= address and address + count <= start + size for start, size in self.live.items()
        )
        assert inside, f"{count} bytes at {address}: not of one allocation"
        return self.memory[address - self.base : address - self.base + count]

    def _set_device(self, ordinal: int) -> tuple[int]:
        self.current.ordinal = ordinal
        return (0,)

    def _call(self, name: str, *, in_capture: bool) -> None:
        assert getattr(self.current, "ordinal", 0) == 0, f"{name}: another GPU is the current one"
        if self.is_broken:
            raise DeviceLost(
                f"CUDA: {name} failed: an illegal memory access was encountered (cudaErrorIllegalAddress);"
                " this process cannot use the GPU any more: restart it"
            )
        if self.recording is not None and not in_capture:
            raise SessionError(f"CUDA: {name} failed: operation not permitted when stream is capturing")
