"""Times rows in interleaved rounds, with medians and ranges, and the load of the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Protocol, TypeVar

import numpy as np

from .tasks.tasks import TaskRow

BUSY = 0.5  # running programs for each core before the measurement
WARM_TOKENS = 8  # of the answers before the first round, because the first steps of a shape are slow
WARM = "warm"  # their round
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


@dataclass(frozen=True, slots=True)
class Lap:
    """Rows decoded once at one setting: the wall-clock seconds, and the `answers` in their order."""

    seconds: float
    tokens: float
    forwards: int
    answers: tuple[Any, ...] = ()

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / max(self.seconds, 1e-9)

    def __add__(self, later: Lap) -> Lap:
        """Both, one after the other."""
        return Lap(
            self.seconds + later.seconds,
            self.tokens + later.tokens,
            self.forwards + later.forwards,
            self.answers + later.answers,
        )


def speed_up(laps: Sequence[Lap], others: Sequence[Lap]) -> Rounds:
    """How many times as fast `laps` are as `others`, within each round."""
    return Rounds.of([lap.speed / other.speed for lap, other in zip(laps, others, strict=True)])


def timed(
    settings: Mapping[T, int],
    rows: Sequence[TaskRow],
    num_rounds: int,
    decode: Callable[[T, object, Sequence[TaskRow]], Sequence[Any]],
    tell: Callable[[int, int], None],
    *,
    slice_rows: int | None = None,
) -> dict[T, list[Lap]]:
    """Each setting's laps over the rows, one for each round.

    `settings` have their batches; `decode` gets a setting, the round and the rows, and returns answers with
    `token_ids` and `forwards`; `tell` gets the rows decoded and all.
    """
    for setting, batch in settings.items():
        decode(setting, WARM, [replace(row, max_new_tokens=WARM_TOKENS) for row in rows[:batch]])
    size = slice_rows or len(rows)
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    laps: dict[T, list[Lap]] = {setting: [] for setting in settings}
    done, total = 0, num_rounds * len(rows) * len(settings)
    for number, at, setting in interleaved(list(settings), len(parts), num_rounds):
        tell(done, total)
        start = time.perf_counter()
        answers = tuple(decode(setting, number, parts[at]))
        seconds = time.perf_counter() - start
        tokens, forwards = sum(len(a.token_ids) for a in answers), sum(a.forwards for a in answers)
        lap, mine = Lap(seconds, tokens, forwards, answers), laps[setting]
        mine[number:] = [mine[number] + lap if at else lap]
        done += len(parts[at])
    tell(done, total)
    return laps


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
