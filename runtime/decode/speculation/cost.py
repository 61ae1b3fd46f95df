"""The cost of a step on this machine by its size: a built-in curve, corrected by the steps that run."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

MAX_POINTS = 64
MAX_POSITIONS = 10**6
MAX_REMEMBERED = 4096  # positions whose seconds are remembered: a planner asks dozens of times a step

# Seconds of a step by positions, measured on two cores. Only the shape matters: steps correct the scale.
CURVES = {
    "float32": ((1, 0.0094), (2, 0.0104), (4, 0.0123), (8, 0.0170), (16, 0.0215), (32, 0.0298)),
    "w8a8": ((1, 0.0063), (2, 0.0069), (4, 0.0078), (8, 0.0100), (16, 0.0124), (32, 0.0187)),
    "int4": ((1, 0.0039), (2, 0.0047), (4, 0.0065), (8, 0.0100), (16, 0.0146), (32, 0.0236)),
}
GPU_CURVE = ((1, 0.0050), (64, 0.0060))  # an estimate: a GPU step reads the weights for any few slots

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
NEAR = 0.25  # weight of a neighbouring size's ratio beside a size's own, for each size between them
KEPT = 0.999  # of the weight of a size at each step, so that a size that no longer runs is forgotten
MAX_WEIGHT = 7.0  # steps that the ratio of a size remembers
LIMITED = 3.0  # weight from which a single step counts as at most twice its size's ratio
REFRESH = 16  # recorded steps after which the table is made again
MAX_UNSAVED = 4096


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


def built_in(precision: str, device: str) -> Cost:
    """The curve of a precision on a kind of device, before any step has run."""
    if device != "cpu":
        return Cost(GPU_CURVE)
    return Cost(CURVES.get(precision, CURVES["int4" if precision == "int8" else "float32"]))


@dataclass(frozen=True, slots=True)
class Learned:
    """Measured steps of one size: their `ratio` to the curve, from about `weight` steps."""

    positions: int
    ratio: float
    weight: float

    def __post_init__(self) -> None:
        if not (self.positions in SIZES and 0 < self.ratio < 1e9 and 0 < self.weight <= MAX_WEIGHT + 1):
            raise ValueError("a learned cost needs a known size, a ratio and a weight")


class LearnedCost:
    """The cost of steps, learned while they run. Thread-safe.

    Each step counts for the size nearest to its positions, as a ratio to `curve`. The ratio of a size is a
    moving average over about 8 steps; a single step that was disturbed changes it little. Sizes without
    steps take the ratios of the sizes around them, and so do sizes whose steps are long ago.
    The first step of each shape is left out: it allocates.
    """

    def __init__(self, curve: Cost, learned: Iterable[Learned] = ()) -> None:
        self._curve = curve
        self._ratios, self._weights = [1.0] * len(SIZES), [0.0] * len(SIZES)
        for size in learned:
            i = SIZES.index(size.positions)
            self._ratios[i], self._weights[i] = size.ratio, size.weight
        self._shapes: set[tuple[int, int]] = set()
        self._num_recorded = 0
        self._cost: Cost | None = None
        self._lock = threading.Lock()

    def record(self, rows: int, slots: int, seconds: float) -> bool:
        """Learn from a step. True if what is learned is worth saving: after 16 steps, 32, 64 and so on."""
        with self._lock:
            if (rows, slots) not in self._shapes:
                self._shapes.add((rows, slots))
                return False
            positions = rows * slots
            i = bisect_left(SIZES, positions)
            if i == len(SIZES) or (i > 0 and positions - SIZES[i - 1] < SIZES[i] - positions):
                i -= 1
            self._weights = [weight * KEPT for weight in self._weights]
            ratio, weight = self._ratios[i], min(self._weights[i], MAX_WEIGHT)
            shown = max(seconds, 1e-9) / self._curve.of(positions)
            if weight >= LIMITED:
                shown = min(shown, 2.0 * ratio)
            self._ratios[i] = (weight * ratio + shown) / (weight + 1.0)
            self._weights[i] = weight + 1.0
            self._num_recorded += 1
            if self._num_recorded % REFRESH == 0 or self._num_recorded < REFRESH:
                self._cost = None
            count = self._num_recorded
            return count >= REFRESH and (count & (count - 1) == 0 or count % MAX_UNSAVED == 0)

    @property
    def cost(self) -> Cost:
        """The table of now."""
        with self._lock:
            if self._cost is None:
                self._cost = Cost(tuple(zip(SIZES, map(self._seconds, range(len(SIZES))), strict=True)))
            return self._cost

    @property
    def learned(self) -> tuple[Learned, ...]:
        """The learned state, for a later `LearnedCost` with the same curve."""
        with self._lock:
            known = zip(SIZES, self._ratios, self._weights, strict=True)
            return tuple(Learned(size, ratio, weight) for size, ratio, weight in known if weight > 0)

    def _seconds(self, i: int) -> float:
        """The curve times the mean of the ratios, the nearest sizes counting most."""
        total, weights = 0.0, 0.0
        for j, (ratio, weight) in enumerate(zip(self._ratios, self._weights, strict=True)):
            near = weight * NEAR ** abs(i - j)  # a power of two: exact
            total += near * ratio
            weights += near
        return self._curve.of(SIZES[i]) * (total / weights if weights > 0 else 1.0)
