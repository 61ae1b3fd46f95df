"""KV memory of engines: rows on the device, taken from a pool and returned to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import SessionError
from ..kv import shortage
from .cuda import Runs

if TYPE_CHECKING:
    from .cuda import Device

ALIGNMENT = 256  # bytes: TensorRT requires it of the address of a tensor


def per_slice(runs: int, pitch: int) -> int:
    """Pitches that hold `runs` and end at a multiple of ALIGNMENT, so that one copy reaches every tensor."""
    whole = ALIGNMENT // gcd(ALIGNMENT, pitch)
    return -(-runs // whole) * whole


@dataclass(frozen=True, slots=True)
class KvMemory:
    """One block of `count` KV tensors [rows, kv_heads, capacity, head_dim] on the device; sizes in bytes."""

    address: int
    count: int
    row_bytes: int
    head_bytes: int
    entry_bytes: int
    num_rows: int
    kv_heads: int
    capacity: int

    @property
    def tensor_bytes(self) -> int:
        return self.num_rows * self.row_bytes

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


class TrtSaved:
    """A copy of one row's entries: [kv_heads, length, head_dim] of each tensor in turn."""

    def __init__(self, address: int, length: int) -> None:
        self.address, self.length = address, length


class TrtCache:
    """KV rows on the device. Their memory is taken from the pool at first use, and returned when the cache is
    no longer used. So a new batch does not take memory while the old one still has it.
    """

    def __init__(self, pool: KvPool, num_rows: int) -> None:
        self._pool, self.num_rows = pool, num_rows
        self._memory: KvMemory | None = None

    @property
    def memory(self) -> KvMemory:
        """Raises SessionError if the device has not enough memory."""
        if self._memory is None:
            self._memory = self._pool.take(self.num_rows)
            weakref.finalize(self, self._pool.give_back, self._memory)
        return self._memory

    @property
    def capacity(self) -> int:
        return 0 if self._memory is None else self._memory.capacity

    def reserve(self, capacity: int) -> None:  # noqa: ARG002
        """Take the memory, which has the engine's capacity. The step raises for a row that does not fit: a
        batch reserves for its longest and its widest row together.
        """
        _ = self.memory

    def move(self, source: int, target: int, length: int) -> None:
        if length and source != target:
            self._pool.copy(self.memory, source, target, length)

    @property
    def entry_bytes(self) -> int:
        return self.memory.count * self.memory.kv_heads * self.memory.entry_bytes

    def save(self, row: int, length: int) -> TrtSaved:
        return self._pool.save(self.memory, row, length)

    def load(self, row: int, saved: TrtSaved, length: int) -> None:
        self._pool.load(self.memory, row, saved, length)

    def bring(self, arrays: Sequence[np.ndarray]) -> TrtSaved:
        return self._pool.bring(arrays)

    def fetch(self, saved: TrtSaved) -> list[np.ndarray]:
        return self._pool.fetch(saved)


class KvPool:
    """KV memory like `empty`, which has no rows, for an engine of at most `max_rows` rows.

    Returned memory is reused by the next request that fits in it, so that captured steps, which are bound to
    addresses, can be replayed. At most `max_rows` rows are idle; `forget` is called with memory that is
    freed.
    """

    def __init__(
        self,
        device: Device,
        empty: KvMemory,
        max_rows: int,
        forget: Callable[[KvMemory], None],
        dtype: np.dtype[Any],
    ) -> None:
        self._device, self._forget = device, forget
        self._empty, self._max_rows = empty, max_rows
        self._dtype = dtype  # of entries on the host
        self._idle: list[KvMemory] = []
        self._dropped: list[int] = []  # addresses of saved entries that no longer exist

    def take(self, num_rows: int) -> KvMemory:
        """Zeroed rows. Raises SessionError if the device has not enough memory."""
        with self._device.lock:
            self._sweep()
            fitting = [memory for memory in self._idle if memory.num_rows >= num_rows]
            memory = min(fitting, key=lambda m: m.num_rows) if fitting else self._allocate(num_rows)
            if fitting:
                self._idle.remove(memory)
            # Entries of an earlier request may be infinite, and 0 * infinity is NaN.
            self._device.zero(memory.address, memory.num_bytes)
        return memory

    def give_back(self, memory: KvMemory) -> None:
        self._idle.append(memory)

    def copy(self, memory: KvMemory, source: int, target: int, length: int) -> None:
        """Copy the first `length` entries of one row over another."""
        with self._device.lock:
            self._copy(memory.runs(target), memory.runs(source), length * memory.entry_bytes, memory)

    def save(self, memory: KvMemory, row: int, length: int) -> TrtSaved:
        """A copy of the first `length` entries of a row."""
        run = length * memory.entry_bytes
        with self._device.lock:
            saved = self.saved(length, memory.count * memory.kv_heads * run)
            self._copy(Runs(saved.address, run, memory.kv_heads), memory.runs(row), run, memory)
        return saved

    def load(self, memory: KvMemory, row: int, saved: TrtSaved, length: int) -> None:
        """Copy the first `length` saved entries over a row."""
        run, pitch = length * memory.entry_bytes, saved.length * memory.entry_bytes
        with self._device.lock:
            self._copy(memory.runs(row), Runs(saved.address, pitch, memory.kv_heads), run, memory)

    def _copy(self, target: Runs, source: Runs, run: int, memory: KvMemory) -> None:
        """Copy a run of each head of each tensor, in one call."""
        self._device.copy_runs(target, source, run, memory.kv_heads, memory.count)

    def bring(self, arrays: Sequence[np.ndarray]) -> TrtSaved:
        """A copy for `load` from host arrays [kv_heads, length, head_dim]."""
        heads, length, _ = arrays[0].shape
        size = heads * length * self._empty.entry_bytes
        with self._device.lock:
            saved = self.saved(length, len(arrays) * size)
            for i, array in enumerate(arrays):
                host = np.ascontiguousarray(array)
                self._device.upload(saved.address + i * size, host)
                self._device.synchronize()  # before `host` is freed
        return saved

    def fetch(self, saved: TrtSaved) -> list[np.ndarray]:
        """A saved copy as host arrays [kv_heads, length, head_dim]."""
        e = self._empty
        shape = (e.kv_heads, saved.length, e.entry_bytes // self._dtype.itemsize)
        with self._device.lock:
            arrays = [np.empty(shape, self._dtype) for _ in range(e.count)]
            for i, array in enumerate(arrays):
                self._device.download(array, saved.address + i * array.nbytes)
            self._device.synchronize()
        return arrays

    def saved(self, length: int, num_bytes: int) -> TrtSaved:
        """Memory for `length` entries of a row; it is freed when the result is no longer used."""
        with self._device.lock:
            self._sweep()
            saved = TrtSaved(self._device.allocate(num_bytes), length)
        # Only noted here: the thread that collects garbage may hold any lock.
        weakref.finalize(saved, self._dropped.append, saved.address)
        return saved

    def _sweep(self) -> None:
        while self._dropped:
            self._device.free(self._dropped.pop())

    def _allocate(self, num_rows: int) -> KvMemory:
        while self._idle and sum(m.num_rows for m in self._idle) + num_rows > self._max_rows:
            self._release(self._idle.pop(0))
        while True:
            try:
                return self._new(num_rows)
            except SessionError:
                if not self._idle:
                    raise
                self._release(self._idle.pop(0))

    def _new(self, num_rows: int) -> KvMemory:
        memory = replace(self._empty, num_rows=num_rows)
        try:
            return replace(memory, address=self._device.allocate(memory.num_bytes))
        except SessionError as error:
            raise shortage(num_rows, memory.capacity, memory.num_bytes, error) from error

    def _release(self, memory: KvMemory) -> None:
        self._forget(memory)
        self._device.free(memory.address)
