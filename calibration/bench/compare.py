"""Compares the laps of all settings: speeds and ratios by round, latencies, scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

import numpy as np

from ..rounds import Percentiles, Rounds
from ..tasks.tasks import TaskRow
from .laps import Lap, Timeline
from .settings import Setting

CONFIDENCE = 0.95  # of the interval of a score
SettingLaps = Sequence[Sequence[Lap]]
"""The laps of one setting: for each round, those of its slices in the order of the rows."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The figures of one setting. Times are in seconds."""

    setting: Setting
    tokens_per_second: Rounds  # of everything, including prompts
    speed_up: Rounds  # over one-token mode at the same batch, in the same round
    tokens_per_forward: float
    ttft: Percentiles | None  # over all answers of all rounds, like the next two
    itl: Percentiles | None  # over events with tokens
    tpot: Percentiles | None
    score: float  # 0 to 1, of the first round
    score_interval: tuple[float, float]  # of the score's mean for any number of rows
    same_answers: float  # share of answers that are those of one-token mode
    # share of exact mode's draft tokens that were verified; None without draft tokens
    draft_acceptance_rate: float | None
    requests_per_second: Rounds  # with `batch` requests at any time
    answer_p95: float | None  # 95 of 100 of them had their whole answer within this time
    answers: int
    tokens: int
    unsteady: int  # answers that differ between rounds
    cut_short: int  # answers that ended because the context was full
    forced: float = 0.0  # share of tokens that the rows' grammars forced, which no rule accepted


def compare(tasks: Sequence[TaskRow], laps: Mapping[Setting, SettingLaps]) -> Iterator[Comparison]:
    """A Comparison for each setting. `laps` must also hold one-token mode at the same batch."""
    for setting, rounds in laps.items():
        baseline = laps[Setting(setting.batch)]
        speeds = [_speed(lap) for lap in rounds]
        by_round = [_answers(lap) for lap in rounds]
        first, every = by_round[0], [answer for answers in by_round for answer in answers]
        pairs = [(a.output, p.output) for a, p in zip(first, _answers(baseline[0]), strict=True)]
        scores = [task.score(a, p) for task, (a, p) in zip(tasks, pairs, strict=True)]
        tokens, forwards = sum(a.num_tokens for a in every), sum(a.stats.forwards for a in every)
        draft_tokens = sum(a.stats.draft_tokens for a in every)
        durations = [a.seconds for a in every if a.seconds is not None]
        yield Comparison(
            setting=setting,
            tokens_per_second=Rounds.of(speeds),
            speed_up=Rounds.of([s / _speed(other) for s, other in zip(speeds, baseline, strict=True)]),
            tokens_per_forward=tokens / forwards if forwards else 0.0,
            ttft=Percentiles.of([a.ttft for a in every if a.ttft is not None]),
            itl=Percentiles.of([gap for a in every for gap in a.gaps]),
            tpot=Percentiles.of([a.tpot for a in every if a.tpot is not None]),
            score=sum(scores) / len(scores),
            score_interval=wilson(sum(scores), len(scores)),
            same_answers=sum(a.token_ids == p.token_ids for a, p in pairs) / len(pairs),
            draft_acceptance_rate=sum(a.stats.accepted_draft_tokens for a in every) / draft_tokens
            if draft_tokens
            else None,
            requests_per_second=Rounds.of([len(first) / _seconds(lap) for lap in rounds]),
            answer_p95=float(np.percentile(durations, 95)) if durations else None,
            answers=len(first),
            tokens=sum(a.num_tokens for a in first),
            unsteady=sum(len({a.output.token_ids for a in row}) > 1 for row in zip(*by_round, strict=True)),
            cut_short=sum(a.finish_reason == "capacity" for a in first),
            forced=sum(a.stats.forced for a in every) / max(1, tokens),
        )


def wilson(right: float, count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's interval for `right` of `count` rows; it is wide for partial scores."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, weight = right / count, 1 + z * z / count
    middle = (share + z * z / (2 * count)) / weight
    half = z / weight * sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def _answers(laps: Sequence[Lap]) -> list[Timeline]:
    return [answer for lap in laps for answer in lap.answers]


def _speed(laps: Sequence[Lap]) -> float:
    """Tokens per second of one round."""
    return sum(lap.tokens for lap in laps) / _seconds(laps)


def _seconds(laps: Sequence[Lap]) -> float:
    return sum(lap.seconds for lap in laps)
