"""Figures taken in interleaved rounds: the order of things, the middle and ends of many values, and whether
the machine was busy meanwhile. Knows not what is measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import numpy as np

Progress = Callable[[str, int, int], None]
"""(phase, pieces done, pieces in all)."""
BUSY = 0.5  # running programs for each core, before our own work began
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rounds:
    """One figure over several rounds: its median, and the lowest and highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Rounds:
        return cls(float(np.median(values)), min(values), max(values))

    def __str__(self) -> str:
        """As a ratio: 1.50x (1.41-1.52)."""
        ends = "" if self.low == self.high else f" ({self.low:.2f}-{self.high:.2f})"
        return f"{self.median:.2f}x{ends}"


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of `count` measurements the median and the 99th percentile, with linear interpolation between
    neighbours.

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


def slices(rows: Sequence[T], size: int) -> list[Sequence[T]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def interleaved(settings: Sequence[T], num_slices: int, num_rounds: int) -> Iterator[tuple[int, int, T]]:
    """(round, slice, setting): every slice goes through all settings before the next one, each time another
    setting first, so that none always runs after the same one, or always last."""
    for turn, (number, at) in enumerate(product(range(num_rounds), range(num_slices))):
        first = turn % len(settings)
        yield from ((number, at, setting) for setting in (*settings[first:], *settings[:first]))


def machine_load() -> float | None:
    """What keeps the machine busy: the mean number of running programs in the last minute."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):  # not on Windows
        return None


def busy_note(load: float | None) -> str | None:
    """What a reader should know of a machine that had other work when ours began."""
    cores = os.cpu_count() or 1
    if load is None or load <= BUSY * cores:
        return None
    return (
        f"the machine was busy (load {load:g} on {cores} cores before the start):"
        " trust ratios more than speeds"
    )


def percent(value: float) -> str:
    return f"{100 * value:.1f} %".replace(".0 %", " %")
