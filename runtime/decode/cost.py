"""What a step costs here by its size, as a small measured table. Knows the device through its backend only,
and nothing of acceptance.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from time import perf_counter

import numpy as np

from .backend import Backend, Cache

ROUNDS = 5  # over all sizes, so that what else the machine does falls on all of them
ENOUGH = 1.0  # seconds: no further round begins after them; a large model is measured once
BEHIND = 64  # KV entries before the measured slots
MOST_POINTS = 64
MOST_POSITIONS = 10**6


MOST_KNOWN = 4096  # positions that a table remembers the seconds of: a policy asks dozens of times a step


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a step by its positions, which are rows x slots: on a CPU, 8 rows of 4 slots cost what one
    row of 32 does.

    `points` are (positions, seconds), both above 0, the positions rising. Between two points the cost is
    linear, beyond the last it goes on with the last slope. Where a larger step took less, the smaller one was
    held up: it counts as no dearer. Raises ValueError for other points.
    """

    points: tuple[tuple[int, float], ...]
    _sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _whole: dict[float, float] = field(init=False, repr=False, compare=False)  # of whole numbers of positions

    def __post_init__(self) -> None:
        sizes, seconds = [p for p, _ in self.points], [s for _, s in self.points]
        rising = all(a < b for a, b in pairwise(sizes))
        if not (
            0 < len(sizes) <= MOST_POINTS
            and sizes[0] >= 1
            and sizes[-1] <= MOST_POSITIONS
            and rising
            and all(0 < s < 1e6 for s in seconds)
        ):
            raise ValueError("a cost table needs rising positions and seconds above 0")
        at_most = list(accumulate(reversed(seconds), min))[::-1]
        object.__setattr__(self, "points", tuple(zip(sizes, at_most, strict=True)))
        object.__setattr__(self, "_sizes", tuple(sizes))
        object.__setattr__(self, "_whole", {})

    def of(self, positions: float) -> float:
        """Seconds of a step of so many positions; a mean may be no whole number."""
        known = self._whole.get(positions)
        if known is not None:
            return known
        seconds = self._between(positions)
        if positions == int(positions) and len(self._whole) < MOST_KNOWN:
            self._whole[positions] = seconds
        return seconds

    def _between(self, positions: float) -> float:
        points = self.points
        i = bisect_left(self._sizes, positions)
        if i == 0 or len(points) == 1:
            return points[0][1]
        i = min(i, len(points) - 1)
        (low, cheap), (high, dear) = points[i - 1], points[i]
        return cheap + (dear - cheap) * ((positions - low) / (high - low))


def step_seconds(
    backend: Backend,
    cache: Cache,
    shape: tuple[int, int],
    cursor: int,
    block: int,
    mask_id: int,
    clock: Callable[[], float] = perf_counter,
) -> float:
    """Time one step of (rows, slots), all of them masks, with every row at `cursor`. Their entries are
    scratch, so it can be taken any number of times.
    """
    rows, slots = shape
    # A real step asks for the outputs of its last known token and its masks, so for a block at most.
    index = np.tile(np.arange(max(0, slots - block), slots, dtype=np.int64), (rows, 1))
    ids, length = np.full(shape, mask_id, np.int64), np.full(rows, cursor, np.int64)
    begun = clock()
    backend.step(cache, 0, ids, length, index, False)
    return clock() - begun


def measure(
    backend: Backend,
    block: int,
    mask_id: int,
    clock: Callable[[], float] = perf_counter,
) -> Cost:
    """Time steps of one row on a scratch cache, from one slot to four blocks, each by its fastest round.

    Takes about ENOUGH seconds, and at least two steps of each size: the first is to warm up.
    """
    most = min(4 * block, backend.max_slots or 4 * block, backend.max_capacity)
    # 2 x block - 1 is a full window: a block of tokens accepted last step, and masks for all predictions but
    # the first.
    powers = (2**i for i in range(block.bit_length()))
    sizes = sorted({n for n in (*powers, block, 2 * block - 1, most) if n <= most})
    behind = min(BEHIND, backend.max_capacity - most)
    cache = backend.new_cache(1)
    cache.reserve(behind + most)

    def timed(slots: int) -> float:
        return step_seconds(backend, cache, (1, slots), behind, block, mask_id, clock)

    for slots in sizes:
        timed(slots)
    begun = clock()
    seconds = {slots: timed(slots) for slots in sizes}
    for _ in range(ROUNDS - 1):
        if clock() - begun > ENOUGH:
            break
        seconds = {slots: min(before, timed(slots)) for slots, before in seconds.items()}
    return Cost(tuple((slots, max(s, 1e-9)) for slots, s in seconds.items()))
