"""Measurements in interleaved rounds: their order, medians and ranges, and the load of the machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import numpy as np

Progress = Callable[[str, int, int], None]
"""Called with (phase, pieces done, all pieces)."""
BUSY = 0.5  # running programs for each core before the measurement
T = TypeVar("T")
Lap = TypeVar("Lap")
Kind = TypeVar("Kind")


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


def run_laps(
    rows: Sequence[T],
    size: int,
    settings: Sequence[Kind],
    num_rounds: int,
    lap: Callable[[str, Sequence[T], Kind], Lap],
    report: Callable[[int, int], None],
) -> dict[Kind, list[list[Lap]]]:
    """Each setting's laps by round, over slices of at most `size` rows. `lap` is called with the name of the
    turn, a slice and a setting, `report` with the rows done and all rows."""
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    laps: dict[Kind, list[list[Lap]]] = {setting: [[] for _ in range(num_rounds)] for setting in settings}
    total, done = num_rounds * len(rows) * len(settings), 0
    report(0, total)
    for number, at, setting in interleaved(settings, len(parts), num_rounds):
        turn = f"round {number + 1}, slice {at + 1}/{len(parts)}"
        laps[setting][number].append(lap(turn, parts[at], setting))
        done += len(parts[at])
        report(done, total)
    return laps


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
