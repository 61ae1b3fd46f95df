"""Compares exact mode with the choice of a calibration: quality, speed, and the worth of a tau."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..rounds import Rounds
from . import bounds, race
from .decoding import Outcome, num_same
from .options import EXACT, ONE_TOKEN, CalibrationOptions, name_of


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
    laps: race.Laps,
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
    tokens, forwards, _ = map(sum, zip(*laps[name], strict=True))
    suffices = race.not_slower(laps, name, best) and bound <= options.max_drop
    needed = "no profile is needed" if suffices else "the bound is not shown"
    return ExactMode(
        num_rows=len(outcomes),
        same=same,
        quality=quality - drop,
        quality_interval=(max(0.0, low - drop), min(1.0, high - drop)),
        drop=drop,
        drop_bound=bound,
        tokens_per_forward=tokens / forwards if forwards else 0.0,
        tokens_per_second=race.tokens_per_second(laps, name),
        speed_up=race.speed_ups(laps)[name],
        suffices=suffices,
        verdict=_verdict(laps, best, kept, needed),
    )


def _verdict(laps: race.Laps, best: str, kept: str, needed: str) -> str:
    name = name_of(EXACT)
    up = race.speed_ups(laps)[name]
    if not race.not_slower(laps, name, best):
        return f"{best} is {race.speedup(laps, best, name)} as fast as exact mode, which {kept}"
    if best == name_of(ONE_TOKEN):
        return f"exact mode {kept}, at {up} the speed of one-token mode: {needed}"
    is_faster = not race.not_slower(laps, best, name)
    how = "faster than" if is_faster else "as fast, within the margin of a tie, as"
    return f"exact mode is {how} {best} ({up} the speed of one-token mode) and {kept}: {needed}"
