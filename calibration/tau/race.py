"""Times settings in interleaved rounds, chooses the fastest, and compares exact mode with the choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from ...runtime.decode.config import GenerationConfig
from ...runtime.session.session import Session
from ..rounds import Lap, Rounds, speed_up, timed
from ..tasks.tasks import TaskRow
from . import bounds
from .decoding import Outcome, decode_rows, num_same
from .options import EXACT, ONE_TOKEN, CalibrationOptions, name_of

ROUNDS = 3
ROWS = 8  # fewer if there are few, and at least four times the batch
TIE = 1.03  # a smaller lead counts as a tie
PHASE = "speed"

Laps = Mapping[str, Sequence[Lap]]
"""Each setting's laps by round. The safest setting, one-token mode, is the first."""


def num_rows(all_rows: int, batch: int) -> int:
    return min(all_rows, max(min(ROWS, all_rows // 5), 4 * batch))


def safest_tie(predicted: Mapping[str, float]) -> str:
    """The first setting, from safe to risky, over which the fastest has no lead."""
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

    def decode(name: str, number: object, rows: Sequence[TaskRow]) -> list[Outcome]:
        # Salts, so that no prompt is in the prefix cache.
        apart = [
            replace(t, form={**t.form, "cache_salt": f"{name} {number} {i}"}) for i, t in enumerate(rows)
        ]
        return list(decode_rows(session, apart, settings[name], batch))

    batches = dict.fromkeys(settings, batch)
    return timed(batches, rows, ROUNDS, decode, lambda done, total: report(PHASE, done, total))


def speed_ups(laps: Laps) -> dict[str, Rounds]:
    """Each setting's ratio to the first, within each round."""
    first = next(iter(laps))
    return {name: speed_up(laps[name], laps[first]) for name in laps}


def tokens_per_second(laps: Laps, name: str) -> float:
    """The median of the rounds."""
    return median(lap.speed for lap in laps[name])


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
    lead = speed_up(laps[other], laps[name])
    return lead.median < TIE or lead.low <= 1


@dataclass(frozen=True, slots=True)
class ExactMode:
    """Exact mode, which keeps the one-token text except for rounding: a step with more slots may round
    differently, above all in w8a8. `same` of `num_rows` rows had the one-token text.

    If all had, `quality` is that of one-token mode. Otherwise all rows were decoded, and `drop` was measured
    and bounded. Its speed is from the same interleaved rounds as the others', as are its tokens per forward.
    `suffices`: the choice has no lead over it and the bound holds, so no profile is needed; `verdict` says
    so in words.
    """

    num_rows: int
    same: int
    quality: float
    quality_interval: tuple[float, float]
    drop: float
    drop_bound: float
    tokens_per_forward: float
    tokens_per_second: float
    speed_up: Rounds
    suffices: bool
    verdict: str


def compare_exact(
    laps: Laps,
    outcomes: Sequence[Outcome],
    references: Sequence[Outcome],
    drops: np.ndarray,
    one_token: tuple[float, tuple[float, float]],
    best: str,
    options: CalibrationOptions,
) -> ExactMode:
    """Exact mode compared with `best`: the choice, or else one-token mode. `drops` are those of the rows
    decoded in it, `one_token` is the quality of one-token mode with its interval."""
    name, same = name_of(EXACT), num_same(outcomes, references)
    drop = bound = 0.0
    kept = "gives the one-token text"
    if same < len(outcomes):
        drop, bound = float(drops.mean()), bounds.upper_bound(drops, 1 - options.confidence)
        kept += (
            f" in {same} of {len(outcomes)} rows (this precision rounds), at a mean drop of"
            f" {100 * drop:.1f} points (below {100 * bound:.1f})"
        )
    quality, (low, high) = one_token
    tokens, forwards = sum(lap.tokens for lap in laps[name]), sum(lap.forwards for lap in laps[name])
    suffices = not_slower(laps, name, best) and bound <= options.max_drop
    needed = "no profile is needed" if suffices else "the bound is not shown"
    return ExactMode(
        num_rows=len(outcomes),
        same=same,
        quality=quality - drop,
        quality_interval=(max(0.0, low - drop), min(1.0, high - drop)),
        drop=drop,
        drop_bound=bound,
        tokens_per_forward=tokens / forwards if forwards else 0.0,
        tokens_per_second=tokens_per_second(laps, name),
        speed_up=speed_ups(laps)[name],
        suffices=suffices,
        verdict=_verdict(laps, best, kept, needed),
    )


def _verdict(laps: Laps, best: str, kept: str, needed: str) -> str:
    name = name_of(EXACT)
    up = speed_ups(laps)[name]
    if not not_slower(laps, name, best):
        return f"{best} is {speed_up(laps[best], laps[name])} as fast as exact mode, which {kept}"
    if best == name_of(ONE_TOKEN):
        return f"exact mode {kept}, at {up} the speed of one-token mode: {needed}"
    is_faster = not not_slower(laps, best, name)
    how = "faster than" if is_faster else "as fast, within the margin of a tie, as"
    return f"exact mode is {how} {best} ({up} the speed of one-token mode) and {kept}: {needed}"
