"""KV rows on a GPU, in memory that is taken from a pool and returned to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import SessionError
from .cuda import Runs
from .kv import shortage

if TYPE_CHECKING:
    from .cuda import Device

ALIGNMENT = 256  # bytes, of the address of a tensor: TensorRT requires it


def per_slice(runs: int, pitch: int) -> int:
    """Pitches that hold `runs` and end at a multiple of ALIGNMENT, so that one copy reaches every tensor."""
    whole = ALIGNMENT // gcd(ALIGNMENT, pitch)
    return -(-runs // whole) * whole


@dataclass(frozen=True, slots=True)
class KvMemory:
    """One block of `count` KV tensors [num_rows, kv_heads, capacity, entry_bytes] on the device. A graph with
    entries first has one head, which is all heads of the model in turn.
    """

    address: int
    count: int
    num_rows: int
    kv_heads: int
    capacity: int
    entry_bytes: int

    @property
    def head_bytes(self) -> int:
        return self.capacity * self.entry_bytes

    @property
    def row_bytes(self) -> int:
        return self.kv_heads * self.head_bytes

    @property
    def heads_per_tensor(self) -> int:
        """Heads of all rows, with the gap between two tensors."""
        return per_slice(self.num_rows * self.kv_heads, self.head_bytes)

    @property
    def num_bytes(self) -> int:
        return self.count * self.heads_per_tensor * self.head_bytes

    @property
    def addresses(self) -> tuple[int, ...]:
        """The address of each tensor."""
        return tuple(
            range(self.address, self.address + self.num_bytes, self.heads_per_tensor * self.head_bytes)
        )

    def runs(self, row: int, entry: int = 0) -> Runs:
        """A row's heads in every tensor, from an entry on."""
        first = self.address + row * self.row_bytes + entry * self.entry_bytes
        return Runs(first, self.head_bytes, self.heads_per_tensor)


class GpuSaved:
    """A copy of one row's entries: [kv_heads, length, head_dim] of each tensor in turn."""

    def __init__(self, address: int, length: int) -> None:
        self.address, self.length = address, length


class GpuCache:
    """KV rows on the device. Their memory is taken from the pool at first use, and returned when the cache is
    no longer used. So a new batch does not take memory while the old one still has it.
    """

    def __init__(self, pool: KvPool, num_rows: int) -> None:
        self._pool, self._device, self.num_rows = pool, pool.device, num_rows
        self._memory: KvMemory | None = None
        self._return: Callable[[], object] = lambda: None  # gives the memory back to the pool, once

    @property
    def memory(self) -> KvMemory:
        """Raises SessionError if the device has not enough memory."""
        if self._memory is None:
            self._take(0, ())
        assert self._memory is not None
        return self._memory

    @property
    def capacity(self) -> int:
        return 0 if self._memory is None else self._memory.capacity

    def reserve(self, capacity: int, lengths: Sequence[int] = ()) -> None:
        if self._memory is None or self._pool.capacity_for(capacity) > self._memory.capacity:
            self._take(capacity, lengths)

    def shrink(self, capacity: int, lengths: Sequence[int]) -> None:
        if self._pool.capacity_for(capacity) < self.capacity:
            self._take(capacity, lengths)

    def _take(self, capacity: int, lengths: Sequence[int]) -> None:
        """Take memory of another capacity, with the first `lengths[i]` entries of row i."""
        old, new = self._memory, self._pool.acquire(self.num_rows, self._pool.capacity_for(capacity))
        with self._device.lock:
            for row, length in enumerate(lengths if old is not None else ()):
                if length:
                    assert old is not None
                    run, heads = length * new.entry_bytes, new.kv_heads
                    self._device.copy_runs(new.runs(row), old.runs(row), run, heads, new.count)
        self._return()
        self._memory, self._return = new, weakref.finalize(self, self._pool.release, new)

    def release(self, row: int) -> None:
        """Zero a row; the device has no memory of single rows."""
        if (memory := self._memory) is not None:
            with self._device.lock, suppress(SessionError):  # a failed device
                for address in memory.addresses:
                    self._device.zero(address + row * memory.row_bytes, memory.row_bytes)

    @property
    def entry_bytes(self) -> int:
        return self.memory.count * self.memory.kv_heads * self.memory.entry_bytes

    def copy_bytes(self, row: int, length: int) -> int:  # noqa: ARG002
        return length * self.entry_bytes

    def move(self, source: int, target: int, length: int) -> None:
        if length and source != target:
            memory = self.memory
            with self._device.lock:
                self._copy(memory.runs(target), memory.runs(source), length * memory.entry_bytes)

    def save(self, row: int, length: int) -> GpuSaved:
        memory, run = self.memory, length * self.memory.entry_bytes
        with self._device.lock:
            saved = self._pool.saved(length, memory.count * memory.kv_heads * run)
            self._copy(Runs(saved.address, run, memory.kv_heads), memory.runs(row), run)
        return saved

    def load(self, row: int, saved: GpuSaved, length: int) -> None:
        memory = self.memory
        pitch = saved.length * memory.entry_bytes
        with self._device.lock:
            source = Runs(saved.address, pitch, memory.kv_heads)
            self._copy(memory.runs(row), source, length * memory.entry_bytes)

    def _copy(self, target: Runs, source: Runs, run: int) -> None:
        """Copy a run of each head of each tensor, in one call."""
        self._device.copy_runs(target, source, run, self.memory.kv_heads, self.memory.count)

    def upload(self, arrays: Sequence[np.ndarray]) -> GpuSaved:
        host = [np.ascontiguousarray(array) for array in arrays]
        with self._device.lock:
            saved = self._pool.saved(host[0].shape[1], sum(array.nbytes for array in host))
            for i, array in enumerate(host):
                self._device.upload(saved.address + i * array.nbytes, array)
            self._device.synchronize()
        return saved

    def download(self, saved: GpuSaved) -> list[np.ndarray]:
        memory, dtype = self._pool.empty, self._pool.dtype
        shape = (memory.kv_heads, saved.length, memory.entry_bytes // dtype.itemsize)
        arrays = [np.empty(shape, dtype) for _ in range(memory.count)]
        with self._device.lock:
            for i, array in enumerate(arrays):
                self._device.download(array, saved.address + i * array.nbytes)
            self._device.synchronize()
        return arrays


class KvPool:
    """KV memory like `empty`, which has no rows and a capacity that `capacity_for` chooses.

    Returned memory is reused by the next request that fits in it, so that captured steps, which are bound to
    addresses, can be replayed. `max_idle`: bytes that may be idle; None for twice the largest memory so far.
    `forget` is called with memory that is freed. `dtype`: of entries on the host.
    """

    def __init__(
        self,
        device: Device,
        empty: KvMemory,
        capacity_for: Callable[[int], int],
        forget: Callable[[KvMemory], None],
        dtype: np.dtype[Any],
        max_idle: int | None = None,
    ) -> None:
        self.device, self.empty, self.dtype, self.capacity_for = device, empty, dtype, capacity_for
        self._max_idle, self._forget, self._largest = max_idle, forget, 0
        self._idle: list[KvMemory] = []
        self._dropped: list[int] = []  # addresses of saved entries that no longer exist

    def acquire(self, num_rows: int, capacity: int) -> KvMemory:
        """Zeroed rows. Raises SessionError if the device has not enough memory."""
        with self.device.lock:
            self._sweep()
            fitting = [m for m in self._idle if m.num_rows >= num_rows and m.capacity >= capacity]
            if fitting:
                memory = min(fitting, key=lambda m: m.num_bytes)
                self._idle.remove(memory)
            else:
                memory = self._allocate(replace(self.empty, num_rows=num_rows, capacity=capacity))
            # Entries of an earlier request may be infinite, and 0 * infinity is NaN.
            self.device.zero(memory.address, memory.num_bytes)
        return memory

    def release(self, memory: KvMemory) -> None:
        self._idle.append(memory)

    def saved(self, length: int, num_bytes: int) -> GpuSaved:
        """Memory for `length` entries of a row; it is freed when the result is no longer used."""
        with self.device.lock:
            self._sweep()
            saved = GpuSaved(self.device.allocate(num_bytes), length)
        # Only noted here: the thread that collects garbage may hold any lock.
        weakref.finalize(saved, self._dropped.append, saved.address)
        return saved

    def _sweep(self) -> None:
        while self._dropped:
            self.device.free(self._dropped.pop())

    def _allocate(self, memory: KvMemory) -> KvMemory:
        self._largest = max(self._largest, memory.num_bytes)
        limit = 2 * self._largest if self._max_idle is None else self._max_idle
        while self._idle and sum(m.num_bytes for m in self._idle) + memory.num_bytes > limit:
            self._release(self._idle.pop(0))
        while True:
            try:
                return replace(memory, address=self.device.allocate(memory.num_bytes))
            except SessionError as error:
                if not self._idle:
                    raise shortage(memory.num_rows, memory.capacity, memory.num_bytes, error) from error
                self._release(self._idle.pop(0))

    def _release(self, memory: KvMemory) -> None:
        self._forget(memory)
        self.device.free(memory.address)
