"""Decodes a task at several tau and says what each of them costs and keeps. Uses the runtime only; picks nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from mars_export.calibration.tasks import Task
from mars_export.runtime import Completion, GenerationConfig
from mars_export.runtime.errors import CalibrationError
from mars_export.runtime.session import Prompt

TAUS = (1.0, 0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
Progress = Callable[[int, int], None]
"""(rows done, rows in all)."""


class Generator(Protocol):
    """What a sweep needs of a session."""

    def generate_batch(self, prompts: Sequence[Prompt], config: Sequence[GenerationConfig]) -> list[Completion]: ...


@dataclass(frozen=True, slots=True)
class Point:
    """A task at one tau.

    With one row at a time, `seconds` and `tokens_timed` leave out the prompt and its first step, so that tokens_per_second is
    the speed of decoding alone. In a batch rows start at different times: there they count everything.
    """

    tau: float
    num_rows: int
    num_right: int
    num_agreeing: int | None  # rows whose output is the one-token output; None when that is not known
    tokens: int
    forwards: int
    tokens_timed: int
    seconds: float

    @property
    def accuracy(self) -> float:
        return self.num_right / self.num_rows

    @property
    def agreement(self) -> float | None:
        return None if self.num_agreeing is None else self.num_agreeing / self.num_rows

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.forwards if self.forwards else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_timed / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, float | int | None]:
        """Counts and the rates that follow from them."""
        return asdict(self) | {
            "accuracy": self.accuracy,
            "agreement": self.agreement,
            "tokens_per_forward": self.tokens_per_forward,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True, slots=True)
class Run:
    """A point and the outputs behind it, in the order of the tasks."""

    point: Point
    outputs: tuple[str, ...]


def run(
    session: Generator,
    tasks: Sequence[Task],
    tau: float,
    *,
    references: Sequence[str] | None = None,
    metric: str = "probability",
    batch: int = 1,
    progress: Progress | None = None,
) -> Run:
    """Decode every task at one tau. `references` are the one-token outputs, needed where a task is judged by agreement."""
    if not tasks:
        raise CalibrationError("there are no tasks to decode")
    if batch < 1:
        raise CalibrationError(f"batch must be 1 or more, not {batch}")
    config = GenerationConfig(tau=tau, metric=metric)
    if references is not None and len(references) != len(tasks):
        raise CalibrationError(f"{len(tasks)} tasks but {len(references)} references")
    if references is None and not config.one_token and any(task.needs_reference for task in tasks):
        raise CalibrationError("tasks judged by agreement need the one-token outputs: decode them at tau 1 first")
    done: list[Completion] = []
    began = time.perf_counter()
    for start in range(0, len(tasks), batch):
        some = tasks[start : start + batch]
        configs = [config.with_values(max_new_tokens=task.max_new_tokens) for task in some]
        done += session.generate_batch([task.prompt for task in some], configs)
        if progress is not None:
            progress(len(done), len(tasks))
    seconds = time.perf_counter() - began
    outputs = tuple(completion.text for completion in done)
    expected = outputs if config.one_token and references is None else references
    right = sum(task.is_right(text, None if expected is None else expected[i]) for i, (task, text) in enumerate(zip(tasks, outputs, strict=True)))
    agreeing = None if expected is None else sum(text == other for text, other in zip(outputs, expected, strict=True))
    tokens, forwards, tokens_timed = (sum(getattr(c.stats, name) for c in done) for name in ("tokens", "forwards", "tokens_after_first"))
    if batch == 1:
        seconds = sum(c.stats.decode_time for c in done)
    else:
        tokens_timed = tokens
    return Run(Point(tau, len(tasks), right, agreeing, tokens, forwards, tokens_timed, seconds), outputs)


def sweep(session: Generator, tasks: Sequence[Task], taus: Sequence[float] = TAUS, *, metric: str = "probability", batch: int = 1) -> Iterator[Point]:
    """Decode the tasks at each tau, one-token mode first, and yield each point as it is ready."""
    one_token = GenerationConfig(tau=1.0 if metric != "entropy" else 0.0, metric=metric)
    first = run(session, tasks, one_token.tau, metric=metric, batch=batch)
    for tau in taus:
        if GenerationConfig(tau=tau, metric=metric).one_token:
            yield first.point
        else:
            yield run(session, tasks, tau, references=first.outputs, metric=metric, batch=batch).point
