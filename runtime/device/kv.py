"""KV rows in the memory that a session computes in. Knows addresses; names no library.

A `static` graph writes a step's entries itself, in place, into what is bound here; of a `delta` graph
`KvRows.place` puts them there, by the copy of each kind of memory (memory.py, cuda_memory.py, trt_memory.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import machine
from ..decode.backend import bucket
from ..errors import SessionError
from .memory import Memory, Tensor
from .ort.binding import Binding

# Entries as the host has them. numpy has no bfloat16, and nobody computes with these bits there.
KV_TYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}

ADVICE = "shorten the prompt or max_new_tokens, or run fewer rows at once"


class KvRows:
    """KV memory of some rows, and what a session has bound of it: never an address that was given back."""

    def __init__(
        self,
        memory: Memory,
        count: int,
        num_rows: int,
        kv_heads: int,
        head_dim: int,
        dtype: np.dtype[Any],
    ) -> None:
        self.memory, self._count, self._dtype = memory, count, dtype
        self.num_rows, self.kv_heads, self.head_dim = num_rows, kv_heads, head_dim
        self.capacity = 0
        self.buffers: list[Any] = []
        self.binding: Binding | None = None
        self.bound: tuple[int, int, bool] | None = (
            None  # what it stands for: first row, rows, logits asked for
        )

    def unbind(self) -> None:
        """Forget the binding; the next step makes one."""
        self.binding = self.bound = None

    @property
    def row_bytes(self) -> int:
        """Of one row of one KV tensor."""
        return self.kv_heads * self.capacity * self.head_dim * self._dtype.itemsize

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` entries a row. Raises SessionError when memory is short; the rows stay as
        they were.
        """
        if capacity <= self.capacity:
            return
        entries = bucket(capacity, self.capacity)
        shape = (self.num_rows, self.kv_heads, entries, self.head_dim)
        taken = entries * self.num_rows * self.entry_bytes
        if self.memory.device == "cpu":
            machine.require(taken, f"KV memory of {self.num_rows} row(s) of {entries} entries", ADVICE)
        try:
            if self.capacity:
                buffers = self.memory.widen(self.buffers, entries)
            else:
                buffers = self.memory.zeros(self._count, shape, self._dtype)
        except Exception as error:  # MemoryError of the host, a class of its own of each device's library
            raise shortage(self.num_rows, entries, taken, error) from error
        # All or nothing: what is below cannot fail, and the old memory goes only with the binding that names
        # it.
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

    def bring(self, arrays: Sequence[np.ndarray]) -> list[Any]:
        return self.memory.bring(arrays)

    def fetch(self, saved: list[Any]) -> list[np.ndarray]:
        return self.memory.fetch(saved)

    def place(self, first: int, kv_length: np.ndarray, new: Sequence[Tensor]) -> None:
        """Put a step's new entries behind the cursors of the rows first, first + 1, ..."""
        self.memory.place(self.buffers, first, kv_length, new)


def shortage(num_rows: int, entries: int, num_bytes: int, error: Exception) -> SessionError:
    """What to say when KV memory cannot be had."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return SessionError(
        f"not enough memory: the KV entries of {num_rows} row(s) of {entries} take {num_bytes / 1e6:.0f} MB"
        f" ({reason});"
        f" {ADVICE}, or free memory",
        code="out_of_memory",
    )
