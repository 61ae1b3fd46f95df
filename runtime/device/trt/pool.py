"""KV memory of engines: rows on the device, taken from a pool and returned to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import SessionError
from ..cuda import Runs
from ..kv import shortage

if TYPE_CHECKING:
    from ..cuda import Device

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
        self._pool, self._device, self.num_rows = pool, pool.device, num_rows
        self._memory: KvMemory | None = None

    @property
    def memory(self) -> KvMemory:
        """Raises SessionError if the device has not enough memory."""
        if self._memory is None:
            self._memory = self._pool.acquire(self.num_rows)
            weakref.finalize(self, self._pool.release, self._memory)
        return self._memory

    @property
    def capacity(self) -> int:
        return 0 if self._memory is None else self._memory.capacity

    def reserve(self, capacity: int, lengths: Sequence[int] = ()) -> None:  # noqa: ARG002
        """Take the memory, which has the engine's capacity. The step raises for a row that does not fit: a
        batch reserves for its longest and its widest row together.
        """
        _ = self.memory

    def shrink(self, capacity: int, lengths: Sequence[int]) -> None:
        """The capacity is the engine's."""

    def release(self, row: int) -> None:
        """The device has no memory of single rows."""

    @property
    def entry_bytes(self) -> int:
        return self.memory.count * self.memory.kv_heads * self.memory.entry_bytes

    def move(self, source: int, target: int, length: int) -> None:
        if length and source != target:
            memory = self.memory
            with self._device.lock:
                self._copy(memory.runs(target), memory.runs(source), length * memory.entry_bytes)

    def save(self, row: int, length: int) -> TrtSaved:
        memory, run = self.memory, length * self.memory.entry_bytes
        with self._device.lock:
            saved = self._pool.saved(length, memory.count * memory.kv_heads * run)
            self._copy(Runs(saved.address, run, memory.kv_heads), memory.runs(row), run)
        return saved

    def load(self, row: int, saved: TrtSaved, length: int) -> None:
        memory = self.memory
        pitch = saved.length * memory.entry_bytes
        with self._device.lock:
            source = Runs(saved.address, pitch, memory.kv_heads)
            self._copy(memory.runs(row), source, length * memory.entry_bytes)

    def _copy(self, target: Runs, source: Runs, run: int) -> None:
        """Copy a run of each head of each tensor, in one call."""
        self._device.copy_runs(target, source, run, self.memory.kv_heads, self.memory.count)

    def upload(self, arrays: Sequence[np.ndarray]) -> TrtSaved:
        host = [np.ascontiguousarray(array) for array in arrays]
        with self._device.lock:
            saved = self._pool.saved(host[0].shape[1], sum(array.nbytes for array in host))
            for i, array in enumerate(host):
                self._device.upload(saved.address + i * array.nbytes, array)
            self._device.synchronize()
        return saved

    def download(self, saved: TrtSaved) -> list[np.ndarray]:
        memory, dtype = self._pool.empty, self._pool.dtype
        shape = (memory.kv_heads, saved.length, memory.entry_bytes // dtype.itemsize)
        arrays = [np.empty(shape, dtype) for _ in range(memory.count)]
        with self._device.lock:
            for i, array in enumerate(arrays):
                self._device.download(array, saved.address + i * array.nbytes)
            self._device.synchronize()
        return arrays


class KvPool:
    """KV memory like `empty`, which has no rows, for an engine of at most `max_rows` rows.

    Returned memory is reused by the next request that fits in it, so that captured steps, which are bound to
    addresses, can be replayed. At most `max_rows` rows are idle; `forget` is called with memory that is
    freed. `dtype`: of entries on the host.
    """

    def __init__(
        self,
        device: Device,
        empty: KvMemory,
        max_rows: int,
        forget: Callable[[KvMemory], None],
        dtype: np.dtype[Any],
    ) -> None:
        self.device, self.empty, self.dtype = device, empty, dtype
        self._max_rows, self._forget = max_rows, forget
        self._idle: list[KvMemory] = []
        self._dropped: list[int] = []  # addresses of saved entries that no longer exist

    def acquire(self, num_rows: int) -> KvMemory:
        """Zeroed rows. Raises SessionError if the device has not enough memory."""
        with self.device.lock:
            self._sweep()
            fitting = [memory for memory in self._idle if memory.num_rows >= num_rows]
            memory = min(fitting, key=lambda m: m.num_rows) if fitting else self._allocate(num_rows)
            if fitting:
                self._idle.remove(memory)
            # Entries of an earlier request may be infinite, and 0 * infinity is NaN.
            self.device.zero(memory.address, memory.num_bytes)
        return memory

    def release(self, memory: KvMemory) -> None:
        self._idle.append(memory)

    def saved(self, length: int, num_bytes: int) -> TrtSaved:
        """Memory for `length` entries of a row; it is freed when the result is no longer used."""
        with self.device.lock:
            self._sweep()
            saved = TrtSaved(self.device.allocate(num_bytes), length)
        # Only noted here: the thread that collects garbage may hold any lock.
        weakref.finalize(saved, self._dropped.append, saved.address)
        return saved

    def _sweep(self) -> None:
        while self._dropped:
            self.device.free(self._dropped.pop())

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
        memory = replace(self.empty, num_rows=num_rows)
        try:
            return replace(memory, address=self.device.allocate(memory.num_bytes))
        except SessionError as error:
            raise shortage(num_rows, memory.capacity, memory.num_bytes, error) from error

    def _release(self, memory: KvMemory) -> None:
        self._forget(memory)
        self.device.free(memory.address)
