"""The steps of an engine, padded to a few sizes.

A context and its CUDA graph belong to one size, and on a GPU a step of few slots takes as long as one of
several. The padding comes after the real slots, so these do not see it; the entries that it writes are after
every cursor, where the next step overwrites them.
"""

from __future__ import annotations

import numpy as np

from ...bundle.variant_info import EngineInfo
from ...decode.backend import StepInput
from ...errors import SessionError
from ..step_io import padded, smallest_fit

MIN_CHUNK = 16  # slots of the smallest step of a prompt that is wider than any decode step


class ShapeBucket:
    """The sizes of an engine with `capacity` entries in a row; `is_fixed`: it was built for one size."""

    def __init__(self, info: EngineInfo, capacity: int, is_fixed: bool) -> None:
        self._capacity, self._is_fixed = capacity, is_fixed
        self._rows, max_slots = info.max_rows, info.max_slots
        self._slots, self._outputs = {max_slots}, {info.max_outputs}
        for r in info.ranges:
            self._outputs |= {r.outputs.min, r.outputs.opt, r.outputs.max}
            if r.name == "decode":
                self._slots |= {r.slots.min, r.slots.opt, r.slots.max}
        size, widest = MIN_CHUNK, max((r.slots.max for r in info.ranges if r.name == "decode"), default=0)
        while size < max_slots:
            self._slots |= {size} if size > widest else set()
            size *= 2

    def fill(self, inputs: StepInput) -> StepInput:
        """A step's inputs, padded. If a row has no room for more slots, their number stays.

        Raises SessionError for a step that is larger than an engine of one size.
        """
        input_ids, kv_length, output_index = inputs
        rows, slots = input_ids.shape
        num_outputs = output_index.shape[1]
        if not self._is_fixed:
            room = self._capacity - int(kv_length.max())
            width, outputs = smallest_fit(self._slots, slots, room), smallest_fit(self._outputs, num_outputs)
            return StepInput(padded(input_ids, rows, width), kv_length, padded(output_index, rows, outputs))
        max_slots = max(self._slots)
        if rows > self._rows or slots > max_slots:
            raise SessionError(
                f"a step of {rows} x {slots} slots; this engine is for exactly {self._rows} x {max_slots}"
            )
        # The rows that only fill up write to the last entries, which no cursor reaches.
        lengths = np.full(self._rows, self._capacity - max_slots)
        lengths[: len(kv_length)] = kv_length
        return StepInput(
            padded(input_ids, self._rows, max_slots), lengths, padded(output_index, self._rows, max_slots)
        )
