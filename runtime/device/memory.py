"""Host memory of a session's tensors and KV rows.

KV tensors are [rows, kv_heads, capacity, head_dim]. A method that raises changes nothing.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

PAGE = mmap.PAGESIZE
# Of memory that child processes do not share. Windows has only such memory.
PRIVATE: dict[str, int] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)


class HostTensor:
    """A numpy array at a fixed address."""

    def __init__(self, array: np.ndarray, block: mmap.mmap | None = None, offset: int = 0) -> None:
        self.array, self.address, self.shape = array, int(array.ctypes.data), array.shape
        self.block, self.offset = block, offset  # where the array is, for KV tensors

    def write(self, value: np.ndarray) -> None:
        """Replace the content by an array of the same shape."""
        self.array[...] = value

    def read(self) -> np.ndarray:
        """A copy in host memory."""
        return self.array.copy()

    def take(self) -> np.ndarray:
        """The content, without a copy if possible; the tensor is not used afterwards."""
        return self.array


class HostMemory:
    """Host memory, as numpy arrays."""

    def tensor(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostTensor:
        """Uninitialized memory for a step's input or output."""
        return HostTensor(np.empty(shape, dtype))

    def zeros(self, count: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[HostTensor]:
        """Empty KV tensors. They must be zero: a masked entry still enters the product 0 * value, and 0 * NaN
        is NaN.

        numpy would ask for huge pages. With pages of the usual size, rows that are never written take no
        memory.
        """
        size = prod(shape)
        block = mmap.mmap(-1, count * size * dtype.itemsize, **PRIVATE)
        return [
            HostTensor(np.frombuffer(block, dtype, size, offset).reshape(shape), block, offset)
            for offset in range(0, count * size * dtype.itemsize, size * dtype.itemsize)
        ]

    def widen(self, buffers: Sequence[HostTensor], capacity: int, lengths: Sequence[int]) -> list[HostTensor]:
        """KV tensors of another capacity with the first `lengths[i]` entries of row i, then zeros. `buffers`
        stay unchanged.
        """
        rows, heads, _, dim = buffers[0].shape
        wider = self.zeros(len(buffers), (rows, heads, capacity, dim), buffers[0].array.dtype)
        for old, new in zip(buffers, wider, strict=True):
            for row, length in enumerate(lengths):
                new.array[row, :, :length] = old.array[row, :, :length]
        return wider

    def release(self, buffers: Sequence[HostTensor], row: int) -> None:
        """Return the whole pages of a row to the system; they are zero when they are next used."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        for buffer in buffers:
            num_bytes = buffer.array[row].nbytes
            start = buffer.offset + row * num_bytes
            first, end = -(-start // PAGE) * PAGE, (start + num_bytes) // PAGE * PAGE
            if buffer.block is not None and first < end:
                buffer.block.madvise(mmap.MADV_DONTNEED, first, end - first)

    def move(self, buffers: Sequence[HostTensor], source: int, target: int, length: int) -> None:
        """Copy at least the first `length` entries of row `source` over row `target`."""
        for buffer in buffers:
            buffer.array[target, :, :length] = buffer.array[source, :, :length]

    def save(self, buffers: Sequence[HostTensor], row: int, length: int) -> list[np.ndarray]:
        """Copies [kv_heads, length, head_dim] of a row's first `length` entries, one of each buffer."""
        return [buffer.array[row, :, :length].copy() for buffer in buffers]

    def load(self, buffers: Sequence[HostTensor], row: int, saved: Sequence[np.ndarray], length: int) -> None:
        """Copy at least the first `length` saved entries over row `row`."""
        for buffer, entries in zip(buffers, saved, strict=True):
            buffer.array[row, :, :length] = entries[:, :length]

    def upload(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Make a copy for `load` from host arrays [kv_heads, length, head_dim]."""
        return list(arrays)

    def download(self, saved: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Saved entries as host arrays."""
        return list(saved)

    def place(
        self, buffers: Sequence[HostTensor], first: int, kv_length: np.ndarray, new: Sequence[HostTensor]
    ) -> None:
        """Write new entries [rows, kv_heads, slots, head_dim] at `kv_length` of the rows from `first` on."""
        rows, _, slots, _ = new[0].shape
        row, entry = np.arange(first, first + rows)[:, None], kv_length[:, None] + np.arange(slots)
        for buffer, entries in zip(buffers, new, strict=True):
            buffer.array[row, :, entry] = entries.array.swapaxes(1, 2)  # [rows, slots, kv_heads, head_dim]
