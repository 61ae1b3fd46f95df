"""Made-up tasks of a benchmark, their answers, and the laps that these took."""

from __future__ import annotations

from collections.abc import Sequence

from mars_export.calibration.bench.laps import Lap, Timeline
from mars_export.calibration.tasks.tasks import Message, Task


def task(words: str, answer: str = "", limit: int = 6) -> Task:
    return Task((Message("user", words),), "agreement", answer or None, limit)


def answer(tokens: Sequence[int], forwards: int, reason: str = "length") -> Timeline:
    return Timeline(" ".join(map(str, tokens)), tuple(tokens), forwards, reason, 0.1, (0.2,) * (forwards - 1))


def lap(seconds: float, *answers: Timeline, memory: int | None = 5) -> Lap:
    return Lap(seconds, memory, answers)
