"""Measurements in interleaved rounds: their order, medians and ranges, and the load of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol, TypeVar

import numpy as np

BUSY = 0.5  # running programs for each core before the measurement
T = TypeVar("T")


class Progress(Protocol):
    """Called with a phase, its pieces done and all of them, and a note on the rest of the work."""

    def __call__(self, phase: str, done: int, total: int, note: str = "") -> None: ...


@dataclass(frozen=True, slots=True)
class Rounds:
    """One figure over several rounds: its median, lowest and highest value."""

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
    """The median and the 99th percentile of `count` measurements, with linear interpolation.

    With fewer than about a hundred, the 99th percentile is nearly the largest one.
    """

    p50: float
    p99: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """None without any measurements."""
        if not values:
            return None
        p50, p99 = np.percentile(values, (50, 99))
        return cls(float(p50), float(p99), len(values))


def interleaved(settings: Sequence[T], num_slices: int, num_rounds: int) -> Iterator[tuple[int, int, T]]:
    """(round, slice, setting): each slice goes through all settings before the next slice. The first setting
    rotates, so that none always runs last or after the same one."""
    for turn, (number, at) in enumerate(product(range(num_rounds), range(num_slices))):
        first = turn % len(settings)
        yield from ((number, at, setting) for setting in (*settings[first:], *settings[:first]))


def busy_note(load: float | None) -> str | None:
    """A note for the reader if the machine was busy before the measurement."""
    cores = os.cpu_count() or 1
    if load is None or load <= BUSY * cores:
        return None
    return (
        f"the machine was busy (load {load:g} on {cores} cores before the start):"
        " trust ratios more than speeds"
    )


def percent(value: float) -> str:
    return f"{100 * value:.1f} %".replace(".0 %", " %")
