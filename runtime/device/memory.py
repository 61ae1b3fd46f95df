"""The memory that a session computes in: what is asked of any device, and the host's. Names no library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class Tensor(Protocol):
    """An array that stays at `address`."""

    @property
    def address(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def write(self, value: np.ndarray) -> None:
        """Replace all of it; the shape is the same."""
        ...

    def read(self) -> np.ndarray:
        """A copy in host memory."""
        ...

    def take(self) -> np.ndarray:
        """The same for the last time, without a copy if it can be."""
        ...


class Memory(Protocol):
    """A device's memory. KV tensors are [rows, kv_heads, capacity, head_dim]. What fails changes nothing."""

    @property
    def device(self) -> str:
        """ONNX Runtime's word for it, such as `cpu` or `cuda`."""
        ...

    @property
    def number(self) -> int:
        """Which of those devices it is, counted from 0."""
        ...

    def tensor(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Memory for a step's input or output; what it holds is not known."""
        ...

    def zeros(self, count: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[Any]:
        """KV tensors without an entry. Zeros, not garbage: an entry that is masked out still enters the
        product
        0 * value, and 0 * NaN is NaN."""
        ...

    def widen(self, buffers: Sequence[Any], capacity: int) -> list[Any]:
        """Larger KV tensors with the same entries, zeros behind them; `buffers` stay as they are."""
        ...

    def move(self, buffers: Sequence[Any], source: int, target: int, length: int) -> None:
        """Copy at least the first `length` entries of row `source` over row `target`."""
        ...

    def save(self, buffers: Sequence[Any], row: int, length: int) -> list[Any]:
        """Copies [kv_heads, length, head_dim] of a row's first `length` entries, one of each buffer."""
        ...

    def load(self, buffers: Sequence[Any], row: int, saved: Sequence[Any], length: int) -> None:
        """Copy at least the first `length` entries of what was saved over row `row`."""
        ...

    def bring(self, arrays: Sequence[np.ndarray]) -> list[Any]:
        """What `load` takes, of host arrays [kv_heads, length, head_dim]."""
        ...

    def fetch(self, saved: Sequence[Any]) -> list[np.ndarray]:
        """What was saved, as host arrays."""
        ...

    def place(self, buffers: Sequence[Any], first: int, kv_length: np.ndarray, new: Sequence[Any]) -> None:
        """Put new entries [rows, kv_heads, slots, head_dim] at `kv_length` of the rows from `first` on."""
        ...


class HostTensor:
    """A numpy array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.address, self.shape = array, int(array.ctypes.data), array.shape

    def write(self, value: np.ndarray) -> None:
        self.array[...] = value

    def read(self) -> np.ndarray:
        return self.array.copy()

    def take(self) -> np.ndarray:
        return self.array


class HostMemory:
    """Numpy arrays, in host memory."""

    device, number = "cpu", 0

    def tensor(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostTensor:
        return HostTensor(np.empty(shape, dtype))

    def zeros(self, count: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[HostTensor]:
        return [HostTensor(np.zeros(shape, dtype)) for _ in range(count)]

    def widen(self, buffers: Sequence[HostTensor], capacity: int) -> list[HostTensor]:
        rows, heads, entries, dim = buffers[0].shape
        wider = self.zeros(len(buffers), (rows, heads, capacity, dim), buffers[0].array.dtype)
        for old, new in zip(buffers, wider, strict=True):
            new.array[:, :, :entries] = old.array
        return wider

    def move(self, buffers: Sequence[HostTensor], source: int, target: int, length: int) -> None:
        for buffer in buffers:
            buffer.array[target, :, :length] = buffer.array[source, :, :length]

    def save(self, buffers: Sequence[HostTensor], row: int, length: int) -> list[np.ndarray]:
        return [buffer.array[row, :, :length].copy() for buffer in buffers]

    def load(self, buffers: Sequence[HostTensor], row: int, saved: Sequence[np.ndarray], length: int) -> None:
        for buffer, entries in zip(buffers, saved, strict=True):
            buffer.array[row, :, :length] = entries[:, :length]

    def bring(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(arrays)

    def fetch(self, saved: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(saved)

    def place(
        self, buffers: Sequence[HostTensor], first: int, kv_length: np.ndarray, new: Sequence[HostTensor]
    ) -> None:
        rows, _, slots, _ = new[0].shape
        row, entry = np.arange(first, first + rows)[:, None], kv_length[:, None] + np.arange(slots)
        for buffer, entries in zip(buffers, new, strict=True):
            buffer.array[row, :, entry] = entries.array.transpose(
                0, 2, 1, 3
            )  # [rows, slots, kv_heads, head_dim]
