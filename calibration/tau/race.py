"""Finds the fastest of several settings: all decode the same rows, in interleaved rounds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ...runtime.decode.config import GenerationConfig
from ...runtime.session.session import Session
from ..journal import Journal
from ..rounds import Progress, Rounds, interleaved, slices
from ..tasks.tasks import Task
from .decoding import decode_rows

ROUNDS = 3
ROWS = 32  # at least; four times the batch if that is more
WARM_TOKENS = 8
TIE = 1.03  # a smaller lead counts as a tie
PHASE = "speed"

Settings = Mapping[str, GenerationConfig]
Speeds = Mapping[str, Sequence[float]]
"""Tokens per second of each setting, by round. The safest setting, one-token mode, is the first."""


@dataclass(frozen=True, slots=True)
class RaceLap:
    """Rows decoded once, including prompts."""

    tokens: int
    seconds: float


def race(
    session: Session,
    journal: Journal,
    tasks: Sequence[Task],
    settings: Settings,
    batch: int,
    report: Progress,
) -> dict[str, list[float]]:
    """Decode the first rows at all `settings`, slice by slice, in interleaved rounds."""
    rows = tasks[: max(ROWS, 4 * batch)]
    field = ", ".join(settings)  # part of the key, because laps with other settings are not comparable
    total, done, is_warm = ROUNDS * len(rows) * len(settings), 0, False
    laps: dict[str, list[list[RaceLap]]] = {name: [[] for _ in range(ROUNDS)] for name in settings}
    report(PHASE, 0, total)
    parts = slices(rows, max(8, 4 * batch))
    for number, at, name in interleaved(list(settings), len(parts), ROUNDS):
        key = f"{PHASE} of {field}: round {number + 1}, slice {at + 1}/{len(parts)}, {name}"
        if key not in journal:
            for config in () if is_warm else settings.values():
                few = [replace(task, max_new_tokens=WARM_TOKENS) for task in rows[:batch]]
                list(decode_rows(session, few, config, batch))
            is_warm = True
            journal[key] = _lap(session, parts[at], settings[name], batch)
        laps[name][number].append(journal.read(key, RaceLap))
        done += len(parts[at])
        report(PHASE, done, total)
    return {name: [_speed(lap) for lap in rounds] for name, rounds in laps.items()}


def speed_ups(speeds: Speeds) -> dict[str, Rounds]:
    """Each setting's ratio to the first, within each round."""
    first = next(iter(speeds.values()))
    return {name: Rounds.of(_ratios(values, first)) for name, values in speeds.items()}


def choose(speeds: Speeds) -> tuple[str, str]:
    """The safest of the settings that tie with the fastest, and the reason."""
    ratios = speed_ups(speeds)
    fastest = max(speeds, key=lambda name: ratios[name].median)
    choice = next(name for name in speeds if is_as_fast(speeds, name, fastest))
    one_token = next(iter(speeds))
    rounds = f"in {len(speeds[fastest])} interleaved rounds over the same rows"
    best = f"{fastest}, {ratios[fastest]} the speed of one-token mode"
    if fastest == one_token:
        return choice, f"no setting that passed was faster than one-token mode {rounds}"
    if choice == fastest:
        return choice, f"the fastest that passed was {best}, {rounds}"
    safer = "one-token mode" if choice == one_token else f"{choice} ({ratios[choice]})"
    return choice, f"the fastest that passed was {best}, {rounds}, but {safer} ties with it and is safer"


def is_as_fast(speeds: Speeds, name: str, other: str) -> bool:
    """Whether `other` has no lead over `name`: a lead has a median of at least TIE, and is there in every
    round.
    """
    lead = _ratios(speeds[other], speeds[name])
    return median(lead) < TIE or min(lead) <= 1


def lead_of(speeds: Speeds, name: str, other: str) -> Rounds:
    """How many times as fast `name` is as `other`, within each round."""
    return Rounds.of(_ratios(speeds[name], speeds[other]))


def _ratios(speeds: Sequence[float], others: Sequence[float]) -> list[float]:
    return [speed / other for speed, other in zip(speeds, others, strict=True)]


def _lap(session: Session, rows: Sequence[Task], config: GenerationConfig, batch: int) -> RaceLap:
    start = time.perf_counter()
    tokens = sum(len(outcome.token_ids) for outcome in decode_rows(session, rows, config, batch))
    return RaceLap(tokens, time.perf_counter() - start)


def _speed(laps: Sequence[RaceLap]) -> float:
    return sum(lap.tokens for lap in laps) / max(sum(lap.seconds for lap in laps), 1e-9)
