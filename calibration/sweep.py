"""Decodes a task at several tau and says what each of them costs and keeps. Uses the runtime only; picks nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from ..runtime import GenerationConfig
from ..runtime.errors import CalibrationError
from .tasks.scores import Output
from .tasks.tasks import Task
from .tau.decoding import Generator, Outcome, decode_rows

TAUS = (1.0, 0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
Progress = Callable[[int, int], None]
"""(rows done, rows in all)."""


@dataclass(frozen=True, slots=True)
class Point:
    """A task at one tau. What `seconds` and `tokens_timed` leave out is said at `Outcome`; `num_right` adds up scores of 0 to 1."""

    tau: float
    num_rows: int
    num_right: float
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
        raise CalibrationError(
            "tasks judged by agreement need the one-token outputs: decode them at tau 1 first"
        )
    done: list[Outcome] = []
    for outcome in decode_rows(session, tasks, config, batch):
        done.append(outcome)
        if progress is not None:
            progress(len(done), len(tasks))
    expected = (
        [o.output for o in done]
        if config.one_token and references is None
        else [Output(text) for text in references or ()]
    )
    right = sum(
        task.score(o.output, expected[i] if expected else None)
        for i, (task, o) in enumerate(zip(tasks, done, strict=True))
    )
    agreeing = (
        sum(o.text == other.text for o, other in zip(done, expected, strict=True)) if expected else None
    )
    tokens, forwards = sum(len(o.token_ids) for o in done), sum(o.forwards for o in done)
    seconds, tokens_timed = sum(o.seconds for o in done), sum(o.tokens_timed for o in done)
    return Run(
        Point(tau, len(tasks), right, agreeing, tokens, forwards, tokens_timed, seconds),
        tuple(o.text for o in done),
    )


def sweep(
    session: Generator,
    tasks: Sequence[Task],
    taus: Sequence[float] = TAUS,
    *,
    metric: str = "probability",
    batch: int = 1,
) -> Iterator[Point]:
    """Decode the tasks at each tau, one-token mode first, and yield each point as it is ready."""
    one_token = GenerationConfig(tau=1.0 if metric != "entropy" else 0.0, metric=metric)
    first = run(session, tasks, one_token.tau, metric=metric, batch=batch)
    for tau in taus:
        if GenerationConfig(tau=tau, metric=metric).one_token:
            yield first.point
        else:
            yield run(session, tasks, tau, references=first.outputs, metric=metric, batch=batch).point
