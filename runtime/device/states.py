"""What recurrent layers keep of rows, in host memory."""

from __future__ import annotations

from math import prod

import numpy as np

from ..bundle.manifest import RecurrentInfo
from ..errors import SessionError

MAX_OUTPUTS = 64  # of a step with recurrent layers, which keep inputs of that many tokens


def state_bytes(info: RecurrentInfo) -> int:
    """What the recurrent layers keep of a row."""
    return 4 * sum(prod(shape) for shape in info.shapes(MAX_OUTPUTS).values())


class StateRows:
    """What recurrent layers keep of some rows.

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
        self.lengths, self._width = np.zeros(num_rows, np.int64), info.width

    def begin(self, rows: slice, kv_length: np.ndarray) -> np.ndarray:
        """The lengths before a step of `rows` with these cursors. A row at 0 begins a text."""
        for row in np.arange(rows.start, rows.stop)[kv_length == 0]:
            self.lengths[row] = 0
            for name, buffer in self.buffers.items():
                # Of the inputs, a text's first step reads only those before its first token.
                buffer[row, : self._width if name.endswith(".inputs") else None] = 0
        return self.lengths[rows]

    def move(self, source: int, target: int) -> None:
        self.lengths[target] = self.lengths[source]
        for buffer in self.buffers.values():
            buffer[target] = buffer[source]
