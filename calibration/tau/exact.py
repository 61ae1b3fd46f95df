"""Compares exact mode with the choice of a calibration: quality, speed, and the worth of a tau."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from ..rounds import Rounds
from . import bounds, race
from .decoding import Outcome
from .options import EXACT, ONE_TOKEN, CalibrationOptions, name_of

Outcomes = Sequence[Outcome]


@dataclass(frozen=True, slots=True)
class ExactMode:
    """Exact mode, which keeps the one-token text except for rounding: a step with more slots may round
    differently, above all in w8a8. `same` of `num_rows` rows had the one-token text.

    If all had, `quality` is that of one-token mode. Otherwise all rows were decoded, and `drop` was measured
    and bounded. Its speed is from the same interleaved rounds as the others'. `suffices`: the choice has no
    lead over it and the bound holds, so that no profile is needed; `verdict` says so in words.
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


def beside(
    speeds: race.Speeds,
    outcomes: Outcomes,
    references: Outcomes,
    drops: np.ndarray,
    one_token: tuple[float, tuple[float, float]],
    best: str,
    options: CalibrationOptions,
) -> ExactMode:
    """Exact mode compared with `best`: the choice, or else one-token mode. `drops` are those of the rows
    decoded in it, `one_token` is the quality of one-token mode with its interval."""
    level, same = 1 - options.confidence, num_same(outcomes, references)
    is_same = same == len(outcomes)
    drop, bound = (0.0, 0.0) if is_same else (float(drops.mean()), bounds.upper_bound(drops, level))
    quality, (low, high) = one_token
    tokens, forwards = sum(len(o.token_ids) for o in outcomes), sum(o.forwards for o in outcomes)
    suffices = race.is_as_fast(speeds, name_of(EXACT), best) and bound <= options.max_drop
    return ExactMode(
        num_rows=len(outcomes),
        same=same,
        quality=quality - drop,
        quality_interval=(max(0.0, low - drop), min(1.0, high - drop)),
        drop=drop,
        drop_bound=bound,
        tokens_per_forward=tokens / forwards if forwards else 0.0,
        tokens_per_second=median(speeds[name_of(EXACT)]),
        speed_up=race.speed_ups(speeds)[name_of(EXACT)],
        suffices=suffices,
        verdict=_verdict(speeds, best, suffices, _kept(same, len(outcomes), drop, bound)),
    )


def _kept(same: int, num_rows: int, drop: float, bound: float) -> str:
    """How many texts exact mode kept, as the end of a sentence."""
    if same == num_rows:
        return "gives the one-token text"
    return (
        f"gives the one-token text in {same} of {num_rows} rows (this precision rounds), at a mean drop of"
        f" {100 * drop:.1f} points (below {100 * bound:.1f})"
    )


def _verdict(speeds: race.Speeds, best: str, suffices: bool, kept: str) -> str:
    name = name_of(EXACT)
    up, needed = (
        race.speed_ups(speeds)[name],
        "no profile is needed" if suffices else "the bound is not shown",
    )
    if not race.is_as_fast(speeds, name, best):
        return f"{best} is {race.lead_of(speeds, best, name)} as fast as exact mode, which {kept}"
    if best == name_of(ONE_TOKEN):
        return f"exact mode {kept}, at {up} the speed of one-token mode: {needed}"
    is_faster = not race.is_as_fast(speeds, best, name)
    how = "faster than" if is_faster else "as fast, within the margin of a tie, as"
    return f"exact mode is {how} {best} ({up} the speed of one-token mode) and {kept}: {needed}"


def num_same(outcomes: Outcomes, references: Outcomes) -> int:
    """The number of rows with the same tokens, among the first."""
    return sum(o.token_ids == r.token_ids for o, r in zip(outcomes, references, strict=False))
