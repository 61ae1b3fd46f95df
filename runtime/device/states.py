"""The states of recurrent layers, in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ..bundle.manifest import RecurrentInfo
from ..errors import SessionError

MAX_OUTPUTS = 64  # of a step with recurrent layers, which keep inputs of that many tokens


FAR = np.iinfo(np.int64).max  # the length of states that a step has not finished


def state_bytes(info: RecurrentInfo, kept: int = MAX_OUTPUTS) -> int:
    """The bytes of a row's states, with the inputs of `kept` tokens from the state on."""
    return 4 * sum(prod(shape) for shape in info.shapes(kept).values())


class StateRows:
    """The states and inputs that recurrent layers keep for some rows.

    buffers: by name suffix, [rows, ...]. lengths: the tokens that each row's states have. Raises SessionError
    if memory is short.
    """

    def __init__(self, info: RecurrentInfo, num_rows: int) -> None:
        shapes = info.shapes(MAX_OUTPUTS).items()
        try:
            self.buffers = {name: np.zeros((num_rows, *shape), np.float32) for name, shape in shapes}
        except (MemoryError, ValueError) as error:  # ValueError: more than any address space has
            raise SessionError(
                f"not enough memory: the recurrent layers' states of {num_rows} row(s) take"
                f" {num_rows * state_bytes(info) / 1e6:.0f} MB; run fewer rows at once, or free memory",
                code="out_of_memory",
            ) from error
        self.lengths, self._info = np.zeros(num_rows, np.int64), info

    def begin(self, rows: slice, kv_length: np.ndarray) -> np.ndarray:
        """The lengths before a step of `rows` with these cursors. A row at 0 begins a text. Until `lengths`
        is set after the step, nothing of the rows can be copied.
        """
        for row in np.arange(rows.start, rows.stop)[kv_length == 0]:
            self.lengths[row] = 0
            for name, buffer in self.buffers.items():
                # Of the inputs, a text's first step reads only those before its first token.
                buffer[row, : self._info.width if name.endswith(".inputs") else None] = 0
        lengths, self.lengths[rows] = self.lengths[rows].copy(), FAR
        return lengths

    def move(self, source: int, target: int) -> None:
        self.lengths[target] = self.lengths[source]
        for buffer in self.buffers.values():
            buffer[target] = buffer[source]

    def copy_bytes(self, row: int, length: int) -> int | None:
        """Size of what `save` returns; None if the states have more than `length` tokens."""
        kept = length - int(self.lengths[row])
        return state_bytes(self._info, kept) if kept >= 0 else None

    def save(self, row: int, length: int) -> list[np.ndarray]:
        """Copies of a row's states, and of the inputs with which a step brings them to `length`."""
        kept = self._info.width + length - int(self.lengths[row])
        parts = {n: kept if n.endswith(".inputs") else None for n in self.buffers}
        return [self.buffers[n][row, :part].copy() for n, part in parts.items()] + [self.lengths[[row]]]

    def load(self, row: int, saved: Sequence[np.ndarray]) -> None:
        for buffer, part in zip(self.buffers.values(), saved, strict=False):
            buffer[row, : len(part)] = part
        self.lengths[row] = saved[-1][0]
