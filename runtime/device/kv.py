"""KV rows in host memory.

An `in-place` graph writes a step's entries itself, in place, into the memory that is bound here. The new
entries of an `appended` graph are copied by `KvRows.place`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..decode.backend import bucket
from ..errors import SessionError
from ..machine import require
from .failures import first_line
from .memory import HostMemory

if TYPE_CHECKING:
    from .ort.binding import Binding

# The types of entries on the host. numpy has no bfloat16, and the host does not compute with entries.
KV_TYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "int8": np.dtype("i1"),
}

ADVICE = "shorten the prompt or max_new_tokens, or run fewer rows at once"


class KvRows:
    """KV memory of some rows, and a session's binding of it, which never outlives the memory."""

    def __init__(
        self,
        count: int,
        num_rows: int,
        kv_heads: int,
        head_dim: int,
        dtype: np.dtype[Any],
    ) -> None:
        self.memory, self._count, self._dtype = HostMemory(), count, dtype
        self.num_rows, self.kv_heads, self.head_dim = num_rows, kv_heads, head_dim
        self.capacity = 0
        self.buffers: list[Any] = []
        self.binding: Binding | None = None
        self.binding_key: tuple[int, int, bool] | None = None  # its first row, rows, and whether with logits

    def unbind(self) -> None:
        """Drop the binding; the next step makes one."""
        self.binding = self.binding_key = None

    @property
    def row_bytes(self) -> int:
        """Size of one row of one KV tensor."""
        return self.kv_heads * self.capacity * self.head_dim * self._dtype.itemsize

    def reserve(self, capacity: int, lengths: Sequence[int] = ()) -> None:
        """Make room for `capacity` entries a row, keeping the first `lengths[i]` entries of row i. Raises
        SessionError if memory is short; the rows stay as they were.
        """
        if capacity <= self.capacity:
            return
        self._resize(bucket(capacity, self.capacity), lengths)

    def shrink(self, capacity: int, lengths: Sequence[int]) -> None:
        self._resize(bucket(capacity, 0), lengths)

    def release(self, row: int) -> None:
        self.memory.release(self.buffers, row)

    def _resize(self, entries: int, lengths: Sequence[int]) -> None:
        shape = (self.num_rows, self.kv_heads, entries, self.head_dim)
        num_rows = max(1, len(lengths))  # unused rows take no memory, because it is never written
        num_bytes = entries * num_rows * self.entry_bytes
        require(num_bytes, f"KV memory of {num_rows} row(s) of {entries} entries", ADVICE)
        try:
            if self.capacity:
                buffers = self.memory.widen(self.buffers, entries, lengths)
            else:
                buffers = self.memory.zeros(self._count, shape, self._dtype)
        except Exception as error:
            raise shortage(num_rows, entries, num_bytes, error) from error
        # From here on nothing can fail. The binding goes first, because it refers to the old memory.
        self.unbind()
        self.buffers, self.capacity = buffers, entries

    def move(self, source: int, target: int, length: int) -> None:
        if length and source != target:
            self.memory.move(self.buffers, source, target, length)

    @property
    def entry_bytes(self) -> int:
        return self._count * self.kv_heads * self.head_dim * self._dtype.itemsize

    def save(self, row: int, length: int) -> list[Any]:
        return self.memory.save(self.buffers, row, length)

    def load(self, row: int, saved: list[Any], length: int) -> None:
        self.memory.load(self.buffers, row, saved, length)

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Any]:
        return self.memory.upload(arrays)

    def download(self, saved: list[Any]) -> list[np.ndarray]:
        return self.memory.download(saved)

    def place(self, first: int, kv_length: np.ndarray, new: Sequence[Any]) -> None:
        """Write a step's new entries at the cursors of the rows first, first + 1, ..."""
        self.memory.place(self.buffers, first, kv_length, new)


def shortage(num_rows: int, entries: int, num_bytes: int, error: Exception) -> SessionError:
    """The error for KV memory that cannot be allocated."""
    return SessionError(
        f"not enough memory: the KV entries of {num_rows} row(s) of {entries} take {num_bytes / 1e6:.0f} MB"
        f" ({first_line(error)});"
        f" {ADVICE}, or free memory",
        code="out_of_memory",
    )
