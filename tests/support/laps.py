"""Made-up tasks of a benchmark, their answers, and the laps that these took."""

from __future__ import annotations

from collections.abc import Sequence

from mars_export import Stats
from mars_export.calibration.bench.laps import Lap, Timeline
from mars_export.calibration.tasks.scores import SCORES, Output
from mars_export.calibration.tasks.tasks import Task


def task(words: str, answer: str = "", limit: int = 6) -> Task:
    return Task([{"role": "user", "content": words}], SCORES["agreement"], answer or None, limit)


def answer(tokens: Sequence[int], forwards: int, reason: str = "length") -> Timeline:
    output = Output(" ".join(map(str, tokens)), tuple(tokens))
    return Timeline(output, Stats(forwards=forwards), reason, 0.1, (0.2,) * (forwards - 1))


def lap(seconds: float, *answers: Timeline) -> Lap:
    return Lap(seconds, answers)
