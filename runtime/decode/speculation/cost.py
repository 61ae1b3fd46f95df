"""The cost of a step on this machine by its size: a built-in curve, corrected by the steps that run."""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

MAX_POINTS = 64
MAX_POSITIONS = 10**6
MAX_REMEMBERED = 4096  # positions whose seconds are remembered: a planner asks dozens of times a step

# Seconds of a step by positions, measured on two cores.
CURVES = {
    "float32": ((1, 0.0094), (2, 0.0104), (4, 0.0123), (8, 0.0170), (16, 0.0215), (32, 0.0298)),
    "w8a8": ((1, 0.0063), (2, 0.0069), (4, 0.0078), (8, 0.0100), (16, 0.0124), (32, 0.0187)),
    "int4": ((1, 0.0039), (2, 0.0047), (4, 0.0065), (8, 0.0100), (16, 0.0146), (32, 0.0236)),
}
LIKE = {"int8": "int4", "w4a8": "w8a8"}
GPU_CURVE = ((1, 0.0050), (64, 0.0060))  # an estimate: a GPU step reads the weights for any few slots

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
LIMIT = 0.15  # of the difference of two steps over their sum: a disturbed step counts no more
GAIN = 0.1  # of it by which a comparison changes the factors of sizes
FORGET = 0.001  # share of what was learned of a size that each step takes away
PACE_KEEP = 0.9  # weight of the earlier steps' pace after a newer step's
REFRESH = 16  # recorded steps after which the table is made again


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
        if (known := self._remembered.get(positions)) is not None:
            return known
        points, seconds = self.points, self.points[0][1]
        if (i := bisect_left(self._sizes, positions)) > 0 and len(points) > 1:
            i = min(i, len(points) - 1)
            (low, cheap), (high, dear) = points[i - 1], points[i]
            seconds = cheap + (dear - cheap) * ((positions - low) / (high - low))
        if positions == int(positions) and len(self._remembered) < MAX_REMEMBERED:
            self._remembered[positions] = seconds
        return seconds


def built_in(precision: str, device: str) -> Cost:
    """The curve of a precision on a kind of device, before any step has run."""
    if device != "cpu":
        return Cost(GPU_CURVE)
    return Cost(CURVES.get(precision, CURVES[LIKE.get(precision, "float32")]))


class LearnedCost:
    """The cost of steps, learned while they run. Thread-safe.

    A slow minute slows all sizes alike, so each step is compared with the one before it: if it took longer in
    proportion than the table says, its size and those beyond become a little slower, the other size and those
    on its side a little faster, by 1.5 % at most. What no later steps confirm fades, so that a size
    costs what `curve` says again, and is tried again.
    """

    def __init__(self, curve: Cost) -> None:
        self._curve = curve
        self._factors = [1.0] * len(SIZES)  # of the curve, which has the shape only
        self._pace = 0.0  # seconds by the clock for each by curve and factors; 0 before the first step
        self._last, self._last_pace = 0, 0.0  # the last step's size and pace
        self._num_recorded = 0
        self._cost: Cost | None = None
        self._is_fixed = False
        self._lock = threading.Lock()

    def fix(self, cost: Cost) -> None:
        """Use this table, and learn no more."""
        with self._lock:
            self._cost, self._is_fixed = cost, True

    def record(self, rows: int, slots: int, seconds: float) -> None:
        """Learn from a step."""
        with self._lock:
            if self._is_fixed:
                return
            positions = rows * slots
            i = min(range(len(SIZES)), key=lambda i: abs(SIZES[i] - positions))
            pace = max(seconds, 1e-9) / (self._curve.of(positions) * self._factors[i])
            if self._num_recorded == 0:
                self._pace, self._last_pace, self._last = pace, pace, i
            difference, way = (pace - self._last_pace) / (pace + self._last_pace), i - self._last
            change = GAIN * max(-LIMIT, min(LIMIT, difference))
            for j, factor in enumerate(self._factors):
                side = (2 * j - i - self._last) / way if way else 0.0  # 1 for this size, -1 for the last one
                changed = factor * (1.0 + change * max(-1.0, min(1.0, side)))
                self._factors[j] = changed + FORGET * (1.0 - changed)
            self._pace = PACE_KEEP * self._pace + (1.0 - PACE_KEEP) * min(pace, 2.0 * self._pace)
            self._last, self._last_pace = i, pace
            self._num_recorded += 1
            if self._num_recorded % REFRESH == 0 or self._num_recorded < REFRESH:
                self._cost = None

    @property
    def cost(self) -> Cost:
        """The table of now, in seconds of this machine."""
        with self._lock:
            if self._cost is None:
                pace = self._pace or 1.0
                factors = zip(SIZES, self._factors, strict=True)
                self._cost = Cost(tuple((n, pace * factor * self._curve.of(n)) for n, factor in factors))
            return self._cost
