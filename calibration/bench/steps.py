"""Measures the cost of a step by its slots, and computes how many tokens it must yield."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from ...runtime.decode.pace.cost import step_seconds
from ...runtime.errors import CalibrationError
from ...runtime.session.session import Session
from ..rounds import Rounds

SLOTS = (1, 2, 3, 4, 6, 8, 12)
REPEATS = 3  # timed steps of one shape in a sweep, of which the median is taken
SWEEPS = 3  # in each round of decoding

Sweep = Mapping[str, float]
"""Milliseconds by the key of a shape."""


@dataclass(frozen=True, slots=True)
class CostCurve:
    """The cost of a step of `batch` rows by its slots: in milliseconds, and relative to one slot in the same
    sweep.
    """

    batch: int
    slots: tuple[int, ...]
    milliseconds: tuple[Rounds, ...]
    relative: tuple[Rounds, ...]

    def to_dict(self) -> dict[str, Any]:
        names = ("slots", "milliseconds", "relative")
        points = zip(self.slots, map(asdict, self.milliseconds), map(asdict, self.relative), strict=True)
        return {"batch": self.batch, "points": [dict(zip(names, point, strict=True)) for point in points]}

    def cost(self, slots: float) -> float:
        """The cost of a step in steps of one slot, interpolated linearly."""
        return float(np.interp(slots, self.slots, [point.median for point in self.relative]))

    def break_even(self, window: int) -> float | None:
        """The fewest tokens per forward with which a window of `window` predictions is as fast as one-token
        mode; None if no number is enough.

        The step after one that yields k tokens has k pending tokens and window - 1 masks. The result is the k
        for which this step costs k steps of one slot.
        """
        if window == 1:
            return 1.0
        yields = np.linspace(1, window, 100 * (window - 1) + 1)
        gains = next((k for k in yields if k >= self.cost(k + window - 1)), None)
        return None if gains is None else float(gains)


class StepTimer:
    """Times steps of all shapes in turn, with KV memory for the largest batch."""

    def __init__(self, session: Session, batches: Sequence[int], cursor: int) -> None:
        self.session, self.batches = session, tuple(dict.fromkeys(batches))
        backend, block = session.backend, session.bundle.manifest.block
        most = 2 * block - 1  # a full window: block pending tokens and block - 1 masks
        self.slots = tuple(sorted({s for s in (*SLOTS, most) if s <= min(most, backend.max_slots or most)}))
        self.cursor = max(0, min(cursor, backend.max_capacity - self.slots[-1]))
        self._cache = backend.new_cache(max(self.batches))
        try:
            self._cache.reserve(self.cursor + self.slots[-1])
        except MemoryError as error:
            raise CalibrationError(
                f"a batch of {max(self.batches)} rows of {self.cursor} tokens does not fit in memory; give a"
                " smaller one"
            ) from error

    @property
    def capacity(self) -> int:
        return self._cache.capacity

    def sweep(self, turn: int) -> Sweep:
        """Time every shape once, starting with another one in each turn."""
        shapes = [(batch, slots) for batch in self.batches for slots in self.slots]
        turn %= len(shapes)
        return {shape_key(*shape): self._time(*shape) for shape in shapes[turn:] + shapes[:turn]}

    def _time(self, batch: int, slots: int) -> float:
        backend, mask_id = self.session.backend, self.session.bundle.manifest.mask_id
        times = [
            step_seconds(backend, self._cache, (batch, slots), self.cursor, mask_id)
            for _ in range(1 + REPEATS)
        ]
        return round(1000 * median(times[1:]), 4)


def shape_key(batch: int, slots: int) -> str:
    return f"{batch}x{slots}"


def curves(sweeps: Sequence[Sweep], batches: Sequence[int], slots: Sequence[int]) -> Iterator[CostCurve]:
    """One curve for each batch, from all sweeps."""
    for batch in dict.fromkeys(batches):
        times = [[sweep[shape_key(batch, s)] for sweep in sweeps] for s in slots]
        relative = [[one / unit for one, unit in zip(row, times[0], strict=True)] for row in times]
        yield CostCurve(batch, tuple(slots), tuple(map(Rounds.of, times)), tuple(map(Rounds.of, relative)))
