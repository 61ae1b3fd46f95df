"""The cost of a step on this machine by its size: a small measured table."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from time import perf_counter

import numpy as np

from ..backend import Backend, Cache

ROUNDS = 5  # over all sizes, so that a busy moment of the machine affects all of them
MAX_SECONDS = 1.0  # seconds after which no further round begins, so that a large model is measured once
CONTEXT = 64  # KV entries before the measured slots
MAX_POINTS = 64
MAX_POSITIONS = 10**6
MAX_REMEMBERED = 4096  # positions whose seconds are remembered: a planner asks dozens of times a step


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a step by its positions, rows x slots: on a CPU, 8 rows of 4 slots cost as much as one row
    of 32.

    `points` are (positions, seconds), both above 0, the positions rising. Between two points the cost is
    linear; after the last it continues with the last slope. Times are made monotonic: a smaller step never
    costs more than a larger one. Raises ValueError for other points.
    """

    points: tuple[tuple[int, float], ...]
    _sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _remembered: dict[float, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes, seconds = [p for p, _ in self.points], [s for _, s in self.points]
        if not (
            0 < len(sizes) <= MAX_POINTS
            and sizes[0] >= 1
            and sizes[-1] <= MAX_POSITIONS
            and all(a < b for a, b in pairwise(sizes))
            and all(0 < s < 1e6 for s in seconds)
        ):
            raise ValueError("a cost table needs rising positions and seconds above 0")
        monotonic = list(accumulate(reversed(seconds), min))[::-1]
        object.__setattr__(self, "points", tuple(zip(sizes, monotonic, strict=True)))
        object.__setattr__(self, "_sizes", tuple(sizes))
        object.__setattr__(self, "_remembered", {})

    def of(self, positions: float) -> float:
        """Seconds of a step of `positions`; an expected number need not be whole."""
        seconds = self._remembered.get(positions)
        if seconds is None:
            seconds = self._interpolated(positions)
            if positions == int(positions) and len(self._remembered) < MAX_REMEMBERED:
                self._remembered[positions] = seconds
        return seconds

    def _interpolated(self, positions: float) -> float:
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
    mask_id: int,
    clock: Callable[[], float] = perf_counter,
) -> float:
    """Time one step of (rows, slots) with every row at `cursor`, which does not move: a token, then masks.

    Each slot has an output, as in exact mode, up to the most that the backend has.
    """
    rows, slots = shape
    outputs = min(slots, backend.max_outputs or slots)
    index = np.tile(np.arange(slots - outputs, slots, dtype=np.int64), (rows, 1))
    ids, length = np.full(shape, mask_id, np.int64), np.full(rows, cursor, np.int64)
    ids[:, 0] = 0  # a step without masks may be cheaper than its slots
    start = clock()
    backend.step(cache, 0, ids, length, index, False)
    return clock() - start


def measure(
    backend: Backend,
    block: int,
    mask_id: int,
    clock: Callable[[], float] = perf_counter,
) -> Cost:
    """Time steps of one row on a temporary cache, from one slot to four blocks, each by its fastest round.

    Takes about MAX_SECONDS seconds, and at least two steps of each size: the first is to warm up.
    """
    most = min(4 * block, backend.max_slots or 4 * block, backend.max_capacity)
    # With a tau all masks has 2 x block - 1 slots: the block accepted last step, and masks for all
    # predictions but the first.
    powers = (2**i for i in range(block.bit_length()))
    sizes = sorted({n for n in (*powers, block, 2 * block - 1, most) if n <= most})
    cursor = min(CONTEXT, backend.max_capacity - most)
    cache = backend.new_cache(1)
    cache.reserve(cursor + most)

    def timed(slots: int) -> float:
        return step_seconds(backend, cache, (1, slots), cursor, mask_id, clock)

    for slots in sizes:
        timed(slots)
    start = clock()
    seconds = {slots: timed(slots) for slots in sizes}
    for _ in range(ROUNDS - 1):
        if clock() - start > MAX_SECONDS:
            break
        seconds = {slots: min(fastest, timed(slots)) for slots, fastest in seconds.items()}
    return Cost(tuple((slots, max(s, 1e-9)) for slots, s in seconds.items()))
