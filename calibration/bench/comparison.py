"""What the laps of all settings say: speeds and ratios by round, waiting times, scores. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..tasks.tasks import Task
from ..tau.setting import Setting
from .serving import Lap
from .spread import Percentiles, Rounds
from .timeline import Timeline

Rounded = Sequence[Sequence[Lap]]
"""The laps of one setting: of each round, those of its slices in the order of the rows."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One setting. Times are in seconds, `peak_memory` in bytes, `score` and `same_answers` from 0 to 1.

    tokens_per_second counts everything, prompts too; speed_up is its ratio to one-token mode at the same batch in the same round.
    ttft, itl and tpot are over all answers (itl: events) of all rounds. `unsteady` answers were not the same in all rounds;
    `cut_short` ones ended because the context was full.
    """

    setting: Setting
    tokens_per_second: Rounds
    speed_up: Rounds
    tokens_per_forward: float
    ttft: Percentiles | None
    itl: Percentiles | None
    tpot: Percentiles | None
    score: float
    same_answers: float
    peak_memory: int | None
    answers: int
    tokens: int
    unsteady: int
    cut_short: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"setting": self.setting.to_dict()}


def compare(tasks: Sequence[Task], laps: Mapping[Setting, Rounded]) -> Iterator[Compared]:
    """One line for each setting; `laps` must hold each one's baseline too."""
    for setting, rounds in laps.items():
        baseline = laps[setting.baseline]
        speeds = [_speed(lap) for lap in rounds]
        ratios = [speed / _speed(other) for speed, other in zip(speeds, baseline, strict=True)]
        first, plain = _answers(rounds[0]), _answers(baseline[0])
        every = [answer for laps_of_round in rounds for answer in _answers(laps_of_round)]
        scores = [
            task.score(answer.output, other.output)
            for task, answer, other in zip(tasks, first, plain, strict=True)
        ]
        forwards = sum(answer.forwards for answer in every)
        tokens = sum(len(answer.token_ids) for answer in every)
        memory = [lap.peak_memory for laps_of_round in rounds for lap in laps_of_round]
        yield Compared(
            setting,
            Rounds.of(speeds),
            Rounds.of(ratios),
            tokens / forwards if forwards else 0.0,
            Percentiles.of([answer.ttft for answer in every if answer.ttft is not None]),
            Percentiles.of([gap for answer in every for gap in answer.gaps]),
            Percentiles.of([answer.tpot for answer in every if answer.tpot is not None]),
            sum(scores) / len(scores),
            sum(answer.token_ids == other.token_ids for answer, other in zip(first, plain, strict=True))
            / len(first),
            None if None in memory else max(m for m in memory if m is not None),
            len(first),
            sum(len(answer.token_ids) for answer in first),
            sum(
                any(_answers(r)[i].token_ids != answer.token_ids for r in rounds)
                for i, answer in enumerate(first)
            ),
            sum(answer.finish_reason == "capacity" for answer in first),
        )


def _answers(laps: Sequence[Lap]) -> list[Timeline]:
    return [answer for lap in laps for answer in lap.answers]


def _speed(laps: Sequence[Lap]) -> float:
    """Tokens per second of one round."""
    return sum(lap.tokens for lap in laps) / sum(lap.seconds for lap in laps)
