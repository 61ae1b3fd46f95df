"""Rows of a small task, the command over them, made-up laps of a benchmark, and a race whose end is known."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from typer.testing import CliRunner

from mars_export import Stats
from mars_export.calibration.laps import Timeline
from mars_export.calibration.rounds import Lap
from mars_export.calibration.tasks.scores import SCORES, Output
from mars_export.calibration.tasks.tasks import TaskRow
from mars_export.calibration.tau.options import CalibrationOptions
from mars_export.calibration.tau.race import Laps
from mars_export.cli import app

WORDS = (
    "hello", "the cat", "one", "in the end", "an apple", "er", "on", "a hat", "thin air", "then", "he",
    "ten", "tan", "none", "a", "the",
)  # fmt: skip
OPTIONS = CalibrationOptions(max_drop=0.4, taus=(0.999, 0.9, 0.5, 0.0), batch=4)


def rows(words: Sequence[str] = WORDS, **fields: Any) -> str:
    """Any answer is right, unless `fields` say otherwise."""
    common = {"answer": "", "score": "contains", "max_new_tokens": 12} | fields
    return "".join(
        json.dumps({"messages": [{"role": "user", "content": word}], **common}) + "\n" for word in words
    )


def shell(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def task(words: str, answer: str = "", limit: int = 6) -> TaskRow:
    return TaskRow([{"role": "user", "content": words}], SCORES["agreement"], answer or None, limit)


def answer(tokens: Sequence[int], forwards: int, reason: str = "length") -> Timeline:
    output = Output(" ".join(map(str, tokens)), tuple(tokens))
    return Timeline(output, Stats(forwards=forwards), reason, 0.1, (0.2,) * (forwards - 1))


def lap(seconds: float, *answers: Timeline) -> Lap:
    return Lap(seconds, sum(a.num_tokens for a in answers), sum(a.forwards for a in answers), answers)


def laps_of(speeds: Mapping[str, Sequence[float]]) -> Laps:
    """Laps of one second with these tokens per second in each round."""
    return {name: [Lap(1.0, speed, 1) for speed in rounds] for name, rounds in speeds.items()}


def by_order(*arguments: Any) -> Laps:
    """Laps as if each setting were twice as fast as the safer one before it."""
    return laps_of({name: [2.0**i] * 3 for i, name in enumerate(arguments[2])})
