"""Sweeps over tau: counts, references and limits, on a session without a model; and once on a tiny bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from mars_export.calibration.sweep import run, sweep
from mars_export.calibration.tasks.tasks import Message, Task
from mars_export.runtime import CalibrationError, Completion, GenerationConfig, Session, Stats


class Scripted:
    """Answers "slow" at tau 1 and "fast" below, with twice the tokens per forward."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []  # rows, and how many at a time

    def generate_each(
        self, prompts: Sequence[object], config: Sequence[GenerationConfig], *, batch: int
    ) -> Iterator[Completion]:
        self.asked.append((len(prompts), batch))
        return map(self.answer, config)

    def answer(self, config: GenerationConfig) -> Completion:
        stats = Stats(tokens=8, forwards=8 if config.one_token else 4, decode_time=2.0, tokens_after_first=6)
        return Completion("slow" if config.one_token else "fast", (1,) * 8, (1.0,) * 8, "eos", stats)


def tasks(metric: str, answer: str | None, count: int = 5) -> list[Task]:
    return [Task((Message("user", "hello"),), metric, answer, 8) for _ in range(count)]


def test_counts() -> None:
    session = Scripted()
    made = run(session, tasks("exact_match", "fast"), 0.9, batch=2)
    assert session.asked == [(5, 2)]
    assert (made.point.accuracy, made.point.tokens_per_forward, made.point.agreement) == (1.0, 2.0, None)


def test_one_row_at_a_time_is_timed_without_the_prompt() -> None:
    point = run(Scripted(), tasks("exact_match", "slow"), 1.0).point
    assert point.tokens_per_second == pytest.approx(3.0)
    assert point.agreement == 1.0


def test_a_sweep_decodes_one_token_mode_once_and_compares_with_it() -> None:
    session = Scripted()
    points = list(sweep(session, tasks("agreement", None), (1.0, 0.9), batch=5))
    assert session.asked == [(5, 5), (5, 5)]
    assert [p.accuracy for p in points] == [1.0, 0.0]
    assert [p.agreement for p in points] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": []}, "no tasks"),
        ({"batch": 0}, "batch must be"),
        ({"references": ["x"]}, "5 tasks but 1 references"),
        ({}, "one-token outputs"),
    ],
)
def test_wrong_calls(arguments: dict[str, object], message: str) -> None:
    call: dict[str, object] = {"tasks": tasks("agreement", None), "tau": 0.9} | arguments
    with pytest.raises(CalibrationError, match=message):
        run(Scripted(), **call)


def test_on_a_real_session(sessions: Callable[[str], Session]) -> None:
    points = list(sweep(sessions("qwen2"), tasks("agreement", None, 3), (1.0, 0.3), batch=3))
    assert points[0].tokens_per_forward == 1.0
    assert points[1].tokens_per_forward > 1.0
