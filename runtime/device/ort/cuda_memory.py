"""GPU memory for ONNX Runtime: tensors that are bound by address, and copies between them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ..cuda import Runs
from ..memory import HostMemory

if TYPE_CHECKING:
    from ..cuda import Device


class CudaTensor:
    """An array at a fixed address. Its memory is freed when nothing refers to it any more."""

    def __init__(
        self, memory: CudaMemory, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._memory, self.address, self.shape, self.dtype = memory, address, shape, dtype

    def write(self, value: np.ndarray) -> None:
        self._memory.write(self.address, np.ascontiguousarray(value, self.dtype))

    def read(self) -> np.ndarray:
        return self._memory.read(self.address, self.shape, self.dtype)

    def take(self) -> np.ndarray:
        return self.read()


class CudaMemory:
    """The memory of one GPU, with the methods of HostMemory. Every method waits for its copies, because ONNX
    Runtime computes on another stream.
    """

    def __init__(self, gpu: Device, device: str = "cuda", number: int = 0) -> None:
        self._gpu, self.device, self.number = gpu, device, number
        self._dropped: list[int] = []  # addresses of tensors that no longer exist
        weakref.finalize(self, gpu.close)

    @property
    def stream(self) -> int:
        """The cudaStream_t of its copies."""
        return self._gpu.stream  # type: ignore[no-any-return]

    def tensor(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> CudaTensor:
        with self._gpu.lock:
            while self._dropped:
                self._gpu.free(self._dropped.pop())
            address = self._gpu.allocate(prod(shape) * dtype.itemsize)
            self._gpu.synchronize()
        tensor = CudaTensor(self, address, shape, dtype)
        # Only noted here: the thread that collects garbage may hold any lock.
        weakref.finalize(tensor, self._dropped.append, address)
        return tensor

    def zeros(self, count: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[CudaTensor]:
        return [self.tensor(shape, dtype) for _ in range(count)]

    def widen(self, buffers: Sequence[CudaTensor], capacity: int, lengths: Sequence[int]) -> list[CudaTensor]:
        rows, heads, entries, dim = buffers[0].shape
        wider = self.zeros(len(buffers), (rows, heads, capacity, dim), buffers[0].dtype)
        entry = dim * buffers[0].dtype.itemsize
        for row, length in enumerate(lengths):
            if not length:
                continue
            offsets = row * heads * capacity * entry, row * heads * entries * entry
            pairs = [
                (new.address + offsets[0], old.address + offsets[1])
                for old, new in zip(buffers, wider, strict=True)
            ]
            self._copy(pairs, (capacity * entry, entries * entry), length * entry, heads)
        return wider

    def release(self, buffers: Sequence[CudaTensor], row: int) -> None:
        """The device has no memory of single rows."""

    def move(self, buffers: Sequence[CudaTensor], source: int, target: int, length: int) -> None:
        heads, pitch, entry, row = _sizes(buffers[0])
        pairs = [(b.address + target * row, b.address + source * row) for b in buffers]
        self._copy(pairs, (pitch, pitch), length * entry, heads)

    def save(self, buffers: Sequence[CudaTensor], row: int, length: int) -> list[CudaTensor]:
        heads, pitch, entry, row_bytes = _sizes(buffers[0])
        dtype, dim = buffers[0].dtype, buffers[0].shape[3]
        saved = [self.tensor((heads, length, dim), dtype) for _ in buffers]
        pairs = [(s.address, b.address + row * row_bytes) for b, s in zip(buffers, saved, strict=True)]
        self._copy(pairs, (length * entry, pitch), length * entry, heads)
        return saved

    def load(self, buffers: Sequence[CudaTensor], row: int, saved: Sequence[CudaTensor], length: int) -> None:
        heads, pitch, entry, row_bytes = _sizes(buffers[0])
        pairs = [(b.address + row * row_bytes, s.address) for b, s in zip(buffers, saved, strict=True)]
        self._copy(pairs, (pitch, saved[0].shape[1] * entry), length * entry, heads)

    def upload(self, arrays: Sequence[np.ndarray]) -> list[CudaTensor]:
        tensors = [self.tensor(array.shape, array.dtype) for array in arrays]
        for tensor, array in zip(tensors, arrays, strict=True):
            tensor.write(array)
        return tensors

    def download(self, saved: Sequence[CudaTensor]) -> list[np.ndarray]:
        return [tensor.read() for tensor in saved]

    def place(
        self, buffers: Sequence[CudaTensor], first: int, kv_length: np.ndarray, new: Sequence[CudaTensor]
    ) -> None:
        heads, pitch, entry, row_bytes = _sizes(buffers[0])
        run = new[0].shape[2] * entry
        pairs = [
            (b.address + (first + i) * row_bytes + length * entry, n.address + i * heads * run)
            for i, length in enumerate(kv_length.tolist())
            for b, n in zip(buffers, new, strict=True)
        ]
        self._copy(pairs, (pitch, run), run, heads)

    def write(self, address: int, array: np.ndarray) -> None:
        with self._gpu.lock:
            self._gpu.upload(address, array)
            self._gpu.synchronize()

    def read(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        array = np.empty(shape, dtype)
        with self._gpu.lock:
            self._gpu.download(array, address)
            self._gpu.synchronize()
        return array

    def _copy(self, pairs: Iterable[tuple[int, int]], pitches: tuple[int, int], run: int, runs: int) -> None:
        """For each (target, source), copy `runs` runs of `run` bytes; their distances there are `pitches`."""
        with self._gpu.lock:
            for target, source in pairs:
                self._gpu.copy_runs(
                    Runs(target, pitches[0], runs), Runs(source, pitches[1], runs), run, runs, 1
                )
            self._gpu.synchronize()


Memory = HostMemory | CudaMemory


def _sizes(buffer: CudaTensor) -> tuple[int, int, int, int]:
    """The number of heads of a row, and the bytes of a head, an entry and a row."""
    _, heads, capacity, dim = buffer.shape
    entry = dim * buffer.dtype.itemsize
    return heads, capacity * entry, entry, heads * capacity * entry
