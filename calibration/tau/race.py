"""Finds the faster of some settings: all decode the same rows, in interleaved rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from ...runtime.decode.config import GenerationConfig
from ...runtime.session.session import Session
from ..rounds import Rounds, interleaved
from ..tasks.tasks import TaskRow
from .decoding import Outcome, decode_rows

ROUNDS = 3
ROWS = 8  # fewer if there are few, and at least four times the batch
WARM_TOKENS = 8
TIE = 1.03  # a smaller lead counts as a tie
PHASE = "speed"

Lap = tuple[int, int, float]  # tokens, forwards, seconds
Laps = Mapping[str, Sequence[Lap]]
"""Each setting's laps by round. The safest setting, one-token mode, is the first."""


def num_rows(all_rows: int, batch: int) -> int:
    return min(all_rows, max(min(ROWS, all_rows // 5), 4 * batch))


def safest_tie(predicted: Mapping[str, float]) -> str:
    """Of settings from safe to risky with these speeds, the first that the fastest has no lead over."""
    return next(name for name, speed in predicted.items() if max(predicted.values()) <= speed * TIE)


def race(
    session: Session,
    tasks: Sequence[TaskRow],
    settings: Mapping[str, GenerationConfig],
    batch: int,
    report: Callable[[str, int, int], None],
) -> Laps:
    """Decode the first rows, with their prompts, at all `settings` in interleaved rounds."""
    rows = tasks[: num_rows(len(tasks), batch)]
    laps: dict[str, list[Lap]] = {name: [] for name in settings}

    def decode(name: str, lap: object, rows: Sequence[TaskRow]) -> list[Outcome]:
        # Salts, so that no prompt is in the prefix cache.
        apart = [replace(t, form={**t.form, "cache_salt": f"{name} {lap} {i}"}) for i, t in enumerate(rows)]
        return list(decode_rows(session, apart, settings[name], batch))

    for name in settings:  # the first steps of a shape are slow
        decode(name, "warm", [replace(task, max_new_tokens=WARM_TOKENS) for task in rows[:batch]])
    done, total = 0, ROUNDS * len(rows) * len(settings)
    for lap, _, name in interleaved(list(settings), 1, ROUNDS):
        report(PHASE, done, total)
        start = time.perf_counter()
        outcomes = decode(name, lap, rows)
        seconds = time.perf_counter() - start
        laps[name].append(
            (sum(len(o.token_ids) for o in outcomes), sum(o.forwards for o in outcomes), seconds)
        )
        done += len(rows)
    report(PHASE, done, total)
    return laps


def speed_ups(laps: Laps) -> dict[str, Rounds]:
    """Each setting's ratio to the first, within each round."""
    first = next(iter(laps))
    return {name: speedup(laps, name, first) for name in laps}


def tokens_per_second(laps: Laps, name: str) -> float:
    """The median of the rounds."""
    return median(map(_speed, laps[name]))


def choose(laps: Laps) -> tuple[str, str]:
    """The safest of the settings that tie with the fastest, and the reason."""
    one_token = next(iter(laps))
    ratios = speed_ups(laps)
    fastest = max(laps, key=lambda name: ratios[name].median)
    choice = next(name for name in laps if not_slower(laps, name, fastest))
    rounds = f"in {len(laps[fastest])} interleaved rounds over the same rows"
    best = f"{fastest}, {ratios[fastest]} the speed of one-token mode"
    if fastest == one_token:
        return choice, f"no setting that passed was faster than one-token mode {rounds}"
    if choice == fastest:
        return choice, f"the fastest that passed was {best}, {rounds}"
    safer = "one-token mode" if choice == one_token else f"{choice} ({ratios[choice]})"
    return choice, f"the fastest that passed was {best}, {rounds}, but {safer} ties with it and is safer"


def not_slower(laps: Laps, name: str, other: str) -> bool:
    """Whether `other` has no lead over `name`: a lead has a median of TIE or more, and is in every round."""
    lead = speedup(laps, other, name)
    return lead.median < TIE or lead.low <= 1


def speedup(laps: Laps, name: str, other: str) -> Rounds:
    """How many times as fast `name` is as `other`, within each round."""
    return Rounds.of(
        [_speed(ours) / _speed(theirs) for ours, theirs in zip(laps[name], laps[other], strict=True)]
    )


def _speed(lap: Lap) -> float:
    tokens, _, seconds = lap
    return tokens / max(seconds, 1e-9)
