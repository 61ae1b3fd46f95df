"""KV memory of engines: rows on the device, taken from a pool and given back. Knows sizes and addresses, no
engine.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import SessionError
from .kv import shortage

if TYPE_CHECKING:
    from .cuda import Device

ALIGNMENT = 256  # bytes: where TensorRT lets a tensor begin


@dataclass(frozen=True, slots=True)
class KvMemory:
    """Device addresses of the KV tensors, each [rows, kv_heads, capacity, head_dim]; the sizes in bytes."""

    addresses: tuple[int, ...]
    row_bytes: int
    head_bytes: int
    entry_bytes: int
    num_rows: int
    kv_heads: int
    capacity: int

    @property
    def tensor_bytes(self) -> int:
        return self.num_rows * self.row_bytes


class TrtSaved:
    """Entries of one row in memory of their own: [kv_heads, length, head_dim] of each tensor in turn."""

    def __init__(self, address: int, length: int) -> None:
        self.address, self.length = address, length


class TrtCache:
    """KV rows on the device. Their memory is taken from the pool at first use, and goes back there when
    the cache is no longer used: a batch that is made before the one it replaces is gone takes none twice.
    """

    def __init__(self, pool: Pool, num_rows: int) -> None:
        self._pool, self.num_rows = pool, num_rows
        self._memory: KvMemory | None = None

    @property
    def memory(self) -> KvMemory:
        """Raises SessionError when the device's memory does not suffice."""
        if self._memory is None:
            self._memory = self._pool.take(self.num_rows)
            weakref.finalize(self, self._pool.give_back, self._memory)
        return self._memory

    @property
    def capacity(self) -> int:
        return 0 if self._memory is None else self._memory.capacity

    def reserve(self, capacity: int) -> None:  # noqa: ARG002
        """Take the memory, which is as large as the engine allows. What does not fit is said by the step,
        row by row, because a batch asks for its longest row and its widest one together.
        """
        _ = self.memory

    def move(self, source: int, target: int, length: int) -> None:
        if length:
            self._pool.copy(self.memory, source, target, length)

    @property
    def entry_bytes(self) -> int:
        return len(self.memory.addresses) * self.memory.kv_heads * self.memory.entry_bytes

    def save(self, row: int, length: int) -> TrtSaved:
        return self._pool.save(self.memory, row, length)

    def load(self, row: int, saved: TrtSaved, length: int) -> None:
        self._pool.load(self.memory, row, saved, length)

    def bring(self, arrays: Sequence[np.ndarray]) -> TrtSaved:
        return self._pool.bring(arrays)

    def fetch(self, saved: TrtSaved) -> list[np.ndarray]:
        return self._pool.fetch(saved)


class Pool:
    """KV memory of `count` tensors for an engine of at most `max_rows` rows. The lock is the backend's.

    What one request gave back serves the next that fits in it, so that captured steps, which are bound to
    addresses, are used again. No more rows lie idle than the engine takes; `forget` is told of memory that
    goes.
    """

    def __init__(
        self,
        device: Device,
        lock: threading.RLock,
        empty: KvMemory,
        count: int,
        max_rows: int,
        forget: Callable[[KvMemory], None],
        dtype: np.dtype[Any],
    ) -> None:
        self._device, self._lock, self._forget = device, lock, forget
        self._empty, self._count, self._max_rows = empty, count, max_rows
        self._dtype = dtype  # of KV entries as the host has them
        self._idle: list[KvMemory] = []
        self._dropped: list[int] = []  # of saved entries that nobody holds any more

    def take(self, num_rows: int) -> KvMemory:
        """Zeroed rows. Raises SessionError when the device's memory does not suffice."""
        with self._lock:
            self._sweep()
            fitting = [memory for memory in self._idle if memory.num_rows >= num_rows]
            memory = min(fitting, key=lambda m: m.num_rows) if fitting else self._allocate(num_rows)
            if fitting:
                self._idle.remove(memory)
            # What an earlier request left may be infinite, and 0 * infinity is NaN.
            for address in memory.addresses:
                self._device.zero(address, memory.tensor_bytes)
        return memory

    def give_back(self, memory: KvMemory) -> None:
        self._idle.append(memory)

    def copy(self, memory: KvMemory, source: int, target: int, length: int) -> None:
        """The first `length` entries of one row over another's."""
        with self._lock:
            for address in memory.addresses:
                there, here = address + target * memory.row_bytes, address + source * memory.row_bytes
                run, pitch = length * memory.entry_bytes, memory.head_bytes
                self._device.copy_rows(there, pitch, here, pitch, run, memory.kv_heads)

    def save(self, memory: KvMemory, row: int, length: int) -> TrtSaved:
        """A copy of the first `length` entries of a row."""
        run = length * memory.entry_bytes
        with self._lock:
            saved = self.saved(length, len(memory.addresses) * memory.kv_heads * run)
            for i, address in enumerate(memory.addresses):
                there, here = saved.address + i * memory.kv_heads * run, address + row * memory.row_bytes
                self._device.copy_rows(there, run, here, memory.head_bytes, run, memory.kv_heads)
        return saved

    def load(self, memory: KvMemory, row: int, saved: TrtSaved, length: int) -> None:
        """The first `length` entries of what was saved over a row's."""
        run, pitch = length * memory.entry_bytes, saved.length * memory.entry_bytes
        with self._lock:
            for i, address in enumerate(memory.addresses):
                there, here = address + row * memory.row_bytes, saved.address + i * memory.kv_heads * pitch
                self._device.copy_rows(there, memory.head_bytes, here, pitch, run, memory.kv_heads)

    def bring(self, arrays: Sequence[np.ndarray]) -> TrtSaved:
        """What `load` takes, of host arrays [kv_heads, length, head_dim]."""
        heads, length, _ = arrays[0].shape
        size = heads * length * self._empty.entry_bytes
        with self._lock:
            saved = self.saved(length, len(arrays) * size)
            for i, array in enumerate(arrays):
                host = np.ascontiguousarray(array)
                self._device.upload(saved.address + i * size, host)
                self._device.synchronize()  # until then it is held
        return saved

    def fetch(self, saved: TrtSaved) -> list[np.ndarray]:
        """What was saved, as host arrays [kv_heads, length, head_dim] of numbers as wide as a KV entry's."""
        e = self._empty
        shape = (e.kv_heads, saved.length, e.entry_bytes // self._dtype.itemsize)
        with self._lock:
            arrays = [np.empty(shape, self._dtype) for _ in range(self._count)]
            for i, array in enumerate(arrays):
                self._device.download(array, saved.address + i * array.nbytes)
            self._device.synchronize()
        return arrays

    def saved(self, length: int, num_bytes: int) -> TrtSaved:
        """Memory for `length` entries of a row; it is given back when the result is no longer used."""
        with self._lock:
            self._sweep()
            saved = TrtSaved(self._device.allocate(num_bytes), length)
        # Only noted there: what collects garbage may hold any lock, or none.
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
        """All tensors or none."""
        e, addresses = self._empty, []
        try:
            for _ in range(self._count):
                addresses.append(self._device.allocate(num_rows * e.row_bytes))
        except SessionError as error:
            for address in addresses:
                self._device.free(address)
            raise shortage(num_rows, e.capacity, self._count * num_rows * e.row_bytes, error) from error
        fields = (e.row_bytes, e.head_bytes, e.entry_bytes, num_rows, e.kv_heads, e.capacity)
        return KvMemory(tuple(addresses), *fields)

    def _release(self, memory: KvMemory) -> None:
        self._forget(memory)
        for address in memory.addresses:
            self._device.free(address)
