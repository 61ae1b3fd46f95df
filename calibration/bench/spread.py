"""Many measurements in few numbers: the middle and the ends of rounds, percentiles of events. Knows not what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Rounds:
    """One figure over several rounds: its median, and the lowest and highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Rounds:
        return cls(float(np.median(values)), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of `count` measurements the median and the 99th percentile, with linear interpolation between neighbours.

    Of fewer than about a hundred the 99th percentile is nearly the largest one.
    """

    p50: float
    p99: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """None of no measurements at all."""
        if not values:
            return None
        p50, p99 = np.percentile(values, (50, 99))
        return cls(float(p50), float(p99), len(values))
