"""What a calibration will do before it does it: its options, the rows it can use, and the candidates in their fixed order."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..runtime import GenerationConfig, MarsError, Session
from ..runtime.accept import METRICS
from ..runtime.errors import CalibrationError
from .tasks.tasks import Task
from .tau import bounds
from .tau.record import recorded_metrics

# From safe to fast, and fixed before any data is seen: a sequence chosen with the rows it is tested on would void the guarantee.
GRID: Mapping[str, tuple[float, ...]] = {
    "probability": (0.99, 0.97, 0.95, 0.93, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5),
    "margin": (0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.2),
    "entropy": (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.4),
}
SHORT_ANSWER = 4  # tokens: of so few, hardly any can be accepted together
SEED = 20260407  # of the order in which rows are tested


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """What to look for: the fastest tau whose mean quality drop is below `max_drop` (0 to 1) with `confidence`.

    Several `metrics` share the error: each is tested at (1 - confidence) / their number. `taus` replaces the grid of a single
    metric; `limit` is the most rows used, `batch` the rows decoded together. Raises CalibrationError that lists every bad value.
    """

    max_drop: float = 0.02
    confidence: float = 0.95
    metrics: tuple[str, ...] = ("probability",)
    taus: tuple[float, ...] = ()
    limit: int | None = None
    batch: int = 1

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.max_drop < 1:
            problems.append(f"max_drop must be between 0 and 1 (0.02 is two points), not {self.max_drop}")
        if not 0.5 <= self.confidence < 1:
            problems.append(f"confidence must be 0.5 or more and below 1, not {self.confidence}")
        unknown = [m for m in self.metrics if m not in METRICS]
        if unknown or not self.metrics or len(set(self.metrics)) < len(self.metrics):
            problems.append(
                f"metrics must be different ones of {', '.join(METRICS)}, not {', '.join(self.metrics) or 'none'}"
            )
        elif self.taus and len(self.metrics) > 1:
            problems.append("taus can be given for one metric only")
        elif self.taus and self._are_disordered():
            problems.append("taus must be numbers that allow more than one token a step, from safe to fast")
        if self.limit is not None and self.limit < 1:
            problems.append(f"limit must be 1 or more, not {self.limit}")
        if self.batch < 1:
            problems.append(f"batch must be 1 or more, not {self.batch}")
        if problems:
            raise CalibrationError("; ".join(problems))

    def _are_disordered(self) -> bool:
        falling = [-t for t in self.taus] if self.metrics[0] == "entropy" else list(self.taus)
        if not all(0 <= t < math.inf for t in self.taus) or falling != sorted(set(falling), reverse=True):
            return True
        return any(GenerationConfig(tau=t, metric=self.metrics[0]).one_token for t in self.taus)

    @property
    def level(self) -> float:
        """The error that each metric's sequence may make."""
        return (1 - self.confidence) / len(self.metrics)

    @property
    def items_needed(self) -> int:
        """Fewest rows that can show the bound at all."""
        return bounds.items_needed(self.max_drop, self.level)

    def candidates(self, metric: str) -> tuple[float, ...]:
        return self.taus or GRID[metric]


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows that will be decoded, in the order they are tested, and how many could not be used."""

    tasks: tuple[Task, ...]
    prompt_tokens: tuple[int, ...]
    too_long: tuple[int, ...]  # row numbers, from 1, whose prompt does not fit the context

    @property
    def limits(self) -> list[int]:
        return [task.max_new_tokens for task in self.tasks]

    @property
    def judges(self) -> str:
        """The task metrics in use."""
        return ", ".join(sorted({task.metric for task in self.tasks}))


def check_session(session: Session, options: CalibrationOptions) -> None:
    """Raise CalibrationError when the session cannot be calibrated as wanted."""
    if session.text is None:
        raise CalibrationError(
            f"{session.bundle.path}: this bundle has no tokenizer, and tasks are text; export a checkpoint that has one"
        )
    lacking = [m for m in options.metrics if m not in recorded_metrics(session)]
    if lacking:
        raise CalibrationError(
            f"this bundle's graph has no {' and no '.join(lacking)}; export it with --metrics, or calibrate probability only"
        )


def make_plan(session: Session, tasks: Sequence[Task], options: CalibrationOptions) -> Plan:
    """Put the rows into their seeded order and leave out those that cannot fit. Raises CalibrationError when none is left."""
    check_session(session, options)
    order = list(range(len(tasks)))
    random.Random(SEED).shuffle(order)
    used: list[tuple[Task, int]] = []
    too_long, refused = [], []
    for i in order[: options.limit]:
        try:
            length = _prompt_length(session, tasks[i])
        except MarsError as error:
            refused.append(f"row {i + 1}: {error}")
            continue
        if length > session.backend.max_capacity:
            too_long.append(i + 1)
        else:
            used.append((tasks[i], length))
    if refused:
        raise CalibrationError("prompts that cannot be decoded:\n  " + "\n  ".join(refused[:20]))
    if not used:
        raise CalibrationError(
            f"every prompt is longer than the context of {session.backend.max_capacity} tokens; nothing is left to decode"
        )
    return Plan(tuple(t for t, _ in used), tuple(n for _, n in used), tuple(sorted(too_long)))


def _prompt_length(session: Session, task: Task) -> int:
    assert session.text is not None
    length = len(session.text.encode(task.prompt))
    if not length:
        raise CalibrationError("the prompt is empty")
    return length


def are_short(lengths: Sequence[int]) -> bool:
    """Whether the answers are too short for tau to matter."""
    return statistics.median(lengths) <= SHORT_ANSWER
