"""KV rows in host memory.

An `in-place` graph writes a step's entries itself, in place, into the memory that is bound here. The new
entries of an `appended` graph are copied by `KvRows.place`.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..bundle.manifest import RecurrentInfo
from ..decode.backend import bucket
from ..errors import SessionError
from ..machine import require
from .failures import first_line
from .states import StateRows

PAGE = mmap.PAGESIZE
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # memory that child processes do not share
# The types of entries on the host. numpy has no bfloat16, and the host does not compute with entries.
KV_TYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "int8": np.dtype("i1"),
}

ADVICE = "shorten the prompt or max_new_tokens, or run fewer rows at once"


class KvRows:
    """KV memory of some rows, and a session's binding of it, which never outlives the memory.

    buffers: the KV tensors, [rows, kv_heads, capacity, head_dim]. states: None without recurrent layers. A
    method that raises changes nothing.
    """

    def __init__(
        self,
        count: int,
        num_rows: int,
        kv_heads: int,
        head_dim: int,
        dtype: np.dtype[Any],
        recurrent: RecurrentInfo | None = None,
    ) -> None:
        self._count, self._dtype = count, dtype
        self.states = None if recurrent is None else StateRows(recurrent, num_rows)
        self.num_rows, self.kv_heads, self.head_dim = num_rows, kv_heads, head_dim
        self.capacity = 0
        self.buffers: list[np.ndarray] = []
        self._block: mmap.mmap | None = None  # the memory of the buffers, one after the other
        self.binding: Any = None
        self.binding_key: tuple[int, int, bool] | None = None  # its first row, rows, and whether with logits

    def unbind(self) -> None:
        """Drop the binding; the next step makes one."""
        self.binding = self.binding_key = None

    @property
    def row_bytes(self) -> int:
        """Size of one row of one KV tensor."""
        return self.kv_heads * self.capacity * self.head_dim * self._dtype.itemsize

    @property
    def entry_bytes(self) -> int:
        return self._count * self.kv_heads * self.head_dim * self._dtype.itemsize

    def reserve(self, capacity: int, lengths: Sequence[int] = ()) -> None:
        """Make room for `capacity` entries a row, keeping the first `lengths[i]` entries of row i. Raises
        SessionError if memory is short; the rows stay as they were.
        """
        if capacity > self.capacity:
            self._resize(bucket(capacity, self.capacity), lengths)

    def shrink(self, capacity: int, lengths: Sequence[int]) -> None:
        self._resize(bucket(capacity, 0), lengths)

    def _resize(self, entries: int, lengths: Sequence[int]) -> None:
        num_rows = max(1, len(lengths))  # unused rows take no memory, because it is never written
        num_bytes = entries * num_rows * self.entry_bytes
        require(num_bytes, f"KV memory of {num_rows} row(s) of {entries} entries", ADVICE)
        try:
            block, buffers = self._zeros(entries)
            for old, new in zip(self.buffers, buffers, strict=False):
                for row, length in enumerate(lengths):
                    new[row, :, :length] = old[row, :, :length]
        except Exception as error:
            raise shortage(num_rows, entries, num_bytes, error) from error
        # From here on nothing can fail. The binding goes first, because it refers to the old memory.
        self.unbind()
        self.buffers, self._block, self.capacity = buffers, block, entries

    def _zeros(self, entries: int) -> tuple[mmap.mmap, list[np.ndarray]]:
        """Empty KV tensors. They must be zero: a masked entry still enters the product 0 * value, and 0 * NaN
        is NaN.

        numpy would ask for huge pages. With pages of the usual size, rows that are never written take no
        memory.
        """
        shape = (self._count, self.num_rows, self.kv_heads, entries, self.head_dim)
        block = mmap.mmap(-1, self.num_rows * entries * self.entry_bytes, PRIVATE)
        return block, list(np.frombuffer(block, self._dtype).reshape(shape))

    def release(self, row: int) -> None:
        """Zero a row. Its whole pages go back to the system; they are zero when they are next used."""
        if self._block is None:
            return
        for i in range(self._count):
            start = (i * self.num_rows + row) * self.row_bytes
            end = start + self.row_bytes
            first, last = -(-start // PAGE) * PAGE, end // PAGE * PAGE
            if first < last:
                self._block.madvise(mmap.MADV_DONTNEED, first, last - first)
            else:
                first = last = end
            self._block[start:first], self._block[last:end] = bytes(first - start), bytes(end - last)

    def move(self, source: int, target: int, length: int) -> None:
        if source != target:
            if self.states is not None:
                self.states.move(source, target)
            for buffer in self.buffers:
                buffer[target, :, :length] = buffer[source, :, :length]

    def copy_bytes(self, row: int, length: int) -> int | None:
        states = 0 if self.states is None else self.states.copy_bytes(row, length)
        return None if states is None else states + length * self.entry_bytes

    def save(self, row: int, length: int) -> list[np.ndarray]:
        """Copies [kv_heads, length, head_dim] of a row's first `length` entries, one of each buffer, and of
        its states.
        """
        entries = [buffer[row, :, :length].copy() for buffer in self.buffers]
        return entries if self.states is None else entries + self.states.save(row, length)

    def load(self, row: int, saved: Sequence[np.ndarray], length: int) -> None:
        for buffer, entries in zip(self.buffers, saved, strict=False):
            buffer[row, :, :length] = entries[:, :length]
        if self.states is not None:
            self.states.load(row, saved[len(self.buffers) :])

    def upload(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(arrays)

    def download(self, saved: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(saved)

    def place(self, first: int, kv_length: np.ndarray, new: Sequence[np.ndarray]) -> None:
        """Write a step's new entries [rows, kv_heads, slots, head_dim] at the cursors of the rows first,
        first + 1, ...
        """
        rows, _, slots, _ = new[0].shape
        row, entry = np.arange(first, first + rows)[:, None], kv_length[:, None] + np.arange(slots)
        for buffer, entries in zip(self.buffers, new, strict=True):
            buffer[row, :, entry] = entries.swapaxes(1, 2)  # [rows, slots, kv_heads, head_dim]


def shortage(num_rows: int, entries: int, num_bytes: int, error: Exception) -> SessionError:
    """The error for KV memory that cannot be allocated."""
    return SessionError(
        f"not enough memory: the KV entries of {num_rows} row(s) of {entries} take {num_bytes / 1e6:.0f} MB"
        f" ({first_line(error)});"
        f" {ADVICE}, or free memory",
        code="out_of_memory",
    )
