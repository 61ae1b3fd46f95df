"""What the laps of all settings say: speeds and ratios by round, waiting times, scores. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

from ..rounds import Percentiles, Rounds
from ..tasks.tasks import Task
from .laps import Lap, Timeline
from .settings import Setting

CONFIDENCE = 0.95  # of the interval of a score
SettingLaps = Sequence[Sequence[Lap]]
"""The laps of one setting: of each round, those of its slices in the order of the rows."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One setting. Times are in seconds, `peak_memory` in bytes, `score` and `same_answers` from 0 to 1.

    requests_per_second is with `batch` requests running at any time; within `answer_p95` seconds 95 of 100 of
    them had their whole answer. tokens_per_second counts everything, prompts too; speed_up is its ratio to
    one-token mode at the same batch in the same round. ttft, itl and tpot are over all answers (itl: events)
    of all rounds.
    `score_interval` is where the mean of the first round's answers would be with any number of rows.
    `proposals_held`: share of exact mode's proposals that held, None where none were fed. `forced`: share of
    the tokens that the rows' grammars gave, which no rule accepted.
    `unsteady` answers were not the same in all rounds; `cut_short` ones ended because the context was full.
    """

    setting: Setting
    tokens_per_second: Rounds
    speed_up: Rounds
    tokens_per_forward: float
    ttft: Percentiles | None
    itl: Percentiles | None
    tpot: Percentiles | None
    score: float
    score_interval: tuple[float, float]
    same_answers: float
    proposals_held: float | None
    peak_memory: int | None
    requests_per_second: Rounds
    answer_p95: float | None
    answers: int
    tokens: int
    unsteady: int
    cut_short: int
    forced: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"setting": self.setting.to_dict()}


def compare(tasks: Sequence[Task], laps: Mapping[Setting, SettingLaps]) -> Iterator[Comparison]:
    """One line for each setting; `laps` must hold each one's baseline too."""
    for setting, rounds in laps.items():
        baseline = laps[setting.baseline]
        speeds = [_speed(lap) for lap in rounds]
        first, plain = _answers(rounds[0]), _answers(baseline[0])
        every = [answer for lap in rounds for answer in _answers(lap)]
        pairs = list(zip(first, plain, strict=True))
        scores = [task.score(a.output, p.output) for task, (a, p) in zip(tasks, pairs, strict=True)]
        memory = [lap.peak_memory for round_ in rounds for lap in round_]
        known = [value for value in memory if value is not None]
        forwards = sum(answer.forwards for answer in every)
        proposed = sum(answer.proposed for answer in every)
        whole = [a.seconds for a in every if a.seconds is not None]
        others = [_answers(lap) for lap in rounds]
        yield Comparison(
            setting=setting,
            tokens_per_second=Rounds.of(speeds),
            speed_up=Rounds.of([s / _speed(other) for s, other in zip(speeds, baseline, strict=True)]),
            tokens_per_forward=sum(len(a.token_ids) for a in every) / forwards if forwards else 0.0,
            ttft=Percentiles.of([a.ttft for a in every if a.ttft is not None]),
            itl=Percentiles.of([gap for a in every for gap in a.gaps]),
            tpot=Percentiles.of([a.tpot for a in every if a.tpot is not None]),
            score=sum(scores) / len(scores),
            score_interval=wilson(sum(scores), len(scores)),
            same_answers=sum(a.token_ids == p.token_ids for a, p in pairs) / len(first),
            proposals_held=sum(a.verified for a in every) / proposed if proposed else None,
            peak_memory=max(known) if len(known) == len(memory) else None,
            requests_per_second=Rounds.of([len(_answers(lap)) / _seconds(lap) for lap in rounds]),
            answer_p95=float(np.percentile(whole, 95)) if whole else None,
            answers=len(first),
            tokens=sum(len(a.token_ids) for a in first),
            unsteady=sum(
                any(other[i].token_ids != a.token_ids for other in others) for i, a in enumerate(first)
            ),
            cut_short=sum(a.finish_reason == "capacity" for a in first),
            forced=sum(a.forced for a in every) / max(1, sum(len(a.token_ids) for a in every)),
        )


def wilson(right: float, count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's interval of a share of `count` rows, `right` of them right; wide for partial scores."""
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
