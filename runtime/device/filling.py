"""The few sizes of step that an engine is run in: smaller ones are filled up with slots and predictions that
nobody asked for. Knows no device.

A context and its CUDA graph belong to one size, and a step of few slots takes a GPU as long as one of
several. Filling stands behind what was asked for, which therefore does not see it; what it writes lies behind
every cursor, where the next step writes.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..bundle.engine_info import EngineInfo
from ..errors import SessionError

LEAST_PIECE = 16  # slots of the smallest step of a prompt that is wider than any decode step


class Filling:
    """Of an engine that holds `capacity` entries in a row; `is_fixed`: built for one size, which is filled in
    any case.
    """

    def __init__(self, info: EngineInfo, capacity: int, is_fixed: bool) -> None:
        self._capacity, self._is_fixed = capacity, is_fixed
        self._rows, most = info.max_rows, info.max_slots
        self._slots, self._outputs = {most}, {info.max_outputs}
        for r in info.ranges:
            self._outputs |= {r.outputs.min, r.outputs.opt, r.outputs.max}
            if r.name == "decode":
                self._slots |= {r.slots.min, r.slots.opt, r.slots.max}
        size, widest = LEAST_PIECE, max((r.slots.max for r in info.ranges if r.name == "decode"), default=0)
        while size < most:
            self._slots |= {size} if size > widest else set()
            size *= 2

    def fill(
        self, input_ids: np.ndarray, kv_length: np.ndarray, output_index: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A step's inputs, filled up. Where a row has no room for more slots they stay as many.

        Raises SessionError for a step beyond the one size of an engine.
        """
        rows, slots = input_ids.shape
        if self._is_fixed:
            return self._fixed(input_ids, kv_length, output_index)
        room = self._capacity - int(kv_length.max())
        wide = least(self._slots, slots, room)
        ids, index = input_ids, output_index
        if wide > slots:
            ids = np.zeros((rows, wide), np.int64)
            ids[:, :slots] = input_ids
        if (count := least(self._outputs, output_index.shape[1])) > output_index.shape[1]:
            index = np.zeros((rows, count), np.int64)
            index[:, : output_index.shape[1]] = output_index
        return ids, kv_length, index

    def _fixed(
        self, input_ids: np.ndarray, kv_length: np.ndarray, output_index: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows, slots = self._rows, max(self._slots)
        if input_ids.shape[0] > rows or input_ids.shape[1] > slots:
            raise SessionError(
                f"a step of {input_ids.shape[0]} x {input_ids.shape[1]} slots; this engine is for exactly"
                f" {rows} x {slots}"
            )
        ids, index = np.zeros((rows, slots), np.int64), np.zeros((rows, slots), np.int64)
        lengths = np.full(rows, self._capacity - slots)
        ids[: input_ids.shape[0], : input_ids.shape[1]] = input_ids
        lengths[: len(kv_length)] = kv_length
        index[: output_index.shape[0], : output_index.shape[1]] = output_index
        return ids, lengths, index


def least(sizes: Iterable[int], wanted: int, most: int | None = None) -> int:
    """The smallest size that holds `wanted` and is no larger than `most`; `wanted` itself where there is
    none.
    """
    return min((n for n in sizes if n >= wanted and (most is None or n <= most)), default=wanted)
