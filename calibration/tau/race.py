"""Finds the fastest of several settings: all decode the same rows, in interleaved rounds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...runtime.decode.config import GenerationConfig
from ...runtime.session.session import Session
from ..journal import Journal
from ..rounds import Progress, Rounds, run_laps
from ..tasks.tasks import TaskRow
from .decoding import decode_rows

ROUNDS = 3
ROWS = 32  # at least; four times the batch if that is more
WARM_TOKENS = 8
TIE = 1.03  # a smaller lead counts as a tie
PHASE = "speed"

Settings = Mapping[str, GenerationConfig]
Speeds = Mapping[str, Sequence[float]]
"""Tokens per second of each setting, by round. The safest setting, one-token mode, is the first."""


def race(
    session: Session,
    journal: Journal,
    tasks: Sequence[TaskRow],
    settings: Settings,
    batch: int,
    report: Progress,
) -> dict[str, list[float]]:
    """Decode the first rows at all `settings`, slice by slice, in interleaved rounds."""
    rows = tasks[: max(ROWS, 4 * batch)]
    field = ", ".join(settings)  # part of the key, because laps with other settings are not comparable

    def lap(turn: str, part: Sequence[TaskRow], name: str) -> tuple[int, float]:
        """(tokens, seconds) of decoding with prompts."""
        key = f"{PHASE} of {field}: {turn}, {name}"
        if key not in journal:
            start = time.perf_counter()
            outcomes = decode_rows(session, part, settings[name], batch)
            tokens = sum(len(outcome.token_ids) for outcome in outcomes)
            journal[key] = {"tokens": tokens, "seconds": time.perf_counter() - start}
        return journal[key]["tokens"], journal[key]["seconds"]

    for config in settings.values():  # the first steps of a shape are slow
        few = [replace(task, max_new_tokens=WARM_TOKENS) for task in rows[:batch]]
        list(decode_rows(session, few, config, batch))
    size = max(8, 4 * batch)
    laps = run_laps(rows, size, list(settings), ROUNDS, lap, lambda done, total: report(PHASE, done, total))
    return {name: [_speed(lap) for lap in rounds] for name, rounds in laps.items()}


def speed_ups(speeds: Speeds) -> dict[str, Rounds]:
    """Each setting's ratio to the first, within each round."""
    first = next(iter(speeds))
    return {name: speedup(speeds, name, first) for name in speeds}


def choose(speeds: Speeds) -> tuple[str, str]:
    """The safest of the settings that tie with the fastest, and the reason."""
    ratios = speed_ups(speeds)
    fastest = max(speeds, key=lambda name: ratios[name].median)
    choice = next(name for name in speeds if not_slower(speeds, name, fastest))
    one_token = next(iter(speeds))
    rounds = f"in {len(speeds[fastest])} interleaved rounds over the same rows"
    best = f"{fastest}, {ratios[fastest]} the speed of one-token mode"
    if fastest == one_token:
        return choice, f"no setting that passed was faster than one-token mode {rounds}"
    if choice == fastest:
        return choice, f"the fastest that passed was {best}, {rounds}"
    safer = "one-token mode" if choice == one_token else f"{choice} ({ratios[choice]})"
    return choice, f"the fastest that passed was {best}, {rounds}, but {safer} ties with it and is safer"


def not_slower(speeds: Speeds, name: str, other: str) -> bool:
    """Whether `other` has no lead over `name`: a lead has a median of at least TIE, and is there in every
    round.
    """
    lead = speedup(speeds, other, name)
    return lead.median < TIE or lead.low <= 1


def speedup(speeds: Speeds, name: str, other: str) -> Rounds:
    """How many times as fast `name` is as `other`, within each round."""
    return Rounds.of([speed / one for speed, one in zip(speeds[name], speeds[other], strict=True)])


def _speed(laps: Sequence[tuple[int, float]]) -> float:
    return sum(tokens for tokens, _ in laps) / max(sum(seconds for _, seconds in laps), 1e-9)
