"""The calibration itself: record, predict, then test real paired decodes from safe to fast. Writes nothing but the journal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from ...runtime import GenerationConfig, Session
from ..journal import Journal
from ..rows import GRID, CalibrationOptions, Plan, are_short, make_plan
from ..tasks.tasks import Task
from . import bounds
from .decoding import Outcome, decode_rows
from .record import Trace, record, recorded_metrics
from .replay import Prediction, predict

Progress = Callable[[str, int, int], None]
"""(phase, rows done, rows in all)."""
SPEED_ROWS = 32  # rows decoded in plain one-token mode, for its speed and to compare with the record pass


class Kept(Protocol):
    """What a journal can hold."""

    def to_dict(self) -> dict[str, Any]: ...

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self: ...


K = TypeVar("K", bound=Kept)


@dataclass(frozen=True, slots=True)
class Measured:
    """Rows decoded at one setting. Qualities are means of 0 to 1 with a confidence interval; speeds are of decoding alone
    with one row at a time, and of everything in batches."""

    metric: str
    tau: float
    num_rows: int
    quality: float
    quality_interval: tuple[float, float]
    agreement: float
    tokens_per_forward: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Tested:
    """A candidate: what it measured, its paired drop against one-token mode, and whether the bound was shown."""

    measured: Measured
    drop: float
    drop_bound: float
    p_value: float
    passed: bool
    predicted: Prediction

    @property
    def prediction_error(self) -> float:
        """Of the tokens per forward, relative to the real ones."""
        return self.predicted.tokens_per_forward / self.measured.tokens_per_forward - 1


@dataclass(frozen=True, slots=True)
class Calibration:
    """A whole calibration. `chosen` is None where nothing but tau 1 could be shown, and `notes` say why."""

    options: CalibrationOptions
    judges: str
    num_rows: int
    too_long: tuple[int, ...]
    cut_short: int
    prompt_range: tuple[int, int]
    answer_range: tuple[int, int]
    one_token: Measured
    speed_rows: int
    speed_rows_same: int
    recorded: tuple[str, ...]
    curve: tuple[Prediction, ...]
    tested: tuple[Tested, ...]
    chosen: Tested | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Calibrator:
    """Decodes with a journal: what is in there is not decoded again."""

    def __init__(
        self, session: Session, journal: Journal, batch: int, progress: Progress | None = None
    ) -> None:
        self.session, self.journal, self.batch = session, journal, batch
        self.report: Progress = progress or (lambda phase, done, total: None)

    def traces(self, tasks: Sequence[Task]) -> list[Trace]:
        return self._kept("record", tasks, lambda rows: record(self.session, rows, self.batch), Trace)

    def outcomes(self, tasks: Sequence[Task], config: GenerationConfig) -> list[Outcome]:
        phase = "one token" if config.one_token else f"{config.metric} {config.tau:g}"
        return self._kept(
            phase, tasks, lambda rows: decode_rows(self.session, rows, config, self.batch), Outcome
        )

    def _kept(
        self, phase: str, tasks: Sequence[Task], work: Callable[[Sequence[Task]], Iterator[K]], kind: type[K]
    ) -> list[K]:
        keys = [f"{phase}/{task.digest[:24]}" for task in tasks]
        missing = {key: task for key, task in zip(keys, tasks, strict=True) if key not in self.journal}
        done = len(tasks) - len(missing)
        self.report(phase, done, len(tasks))
        for key, value in zip(missing, work(list(missing.values())), strict=True):
            self.journal[key] = value.to_dict()
            done += 1
            self.report(phase, done, len(tasks))
        return [kind.from_dict(self.journal[key]) for key in keys]


def identity(session: Session) -> dict[str, Any]:
    """What a journal's work belongs to: a graph with its weights, and how it is run."""
    files = {entry.path: entry.sha256 for entry in session.bundle.manifest.files}
    variant = session.variant
    weights = files.get(variant.weights) if variant.weights else None
    return {
        "graph": files[variant.file],
        "weights": weights,
        "level": variant.accuracy_level,
        "block": session.bundle.manifest.block,
    }


def calibrate(calibrator: Calibrator, tasks: Sequence[Task], options: CalibrationOptions) -> Calibration:
    """Find the fastest tau whose quality drop on tasks like these is below the bound, with the confidence asked for.

    Fixed-sequence testing (Learn then Test, Angelopoulos et al. 2021): candidates are tested from safe to fast at the full level,
    and the first that does not pass ends the sequence, so the chance of passing any that should not is at most the level.
    """
    session = calibrator.session
    plan = make_plan(session, tasks, options)
    traces = calibrator.traces(plan.tasks)
    answers = [len(t.outcome.token_ids) for t in traces]
    qualities = np.array(
        [task.score(t.outcome.output, t.outcome.output) for task, t in zip(plan.tasks, traces, strict=True)]
    )
    recorded = recorded_metrics(session)
    curve = [
        _predict(plan, traces, session, metric, tau)
        for metric in recorded
        for tau in {*GRID[metric], *options.taus}
    ]
    plain = calibrator.outcomes(plan.tasks[:SPEED_ROWS], GenerationConfig(tau=1.0))
    notes = _reasons_not_to_test(plan, answers, options)
    tested: list[Tested] = []
    for metric in () if notes else options.metrics:
        tested += _sequence(calibrator, plan, traces, qualities, options, metric)
    chosen = _fastest(tested)
    one_token = measure("probability", 1.0, plain, qualities, 1.0, options)
    notes += _remarks(plan, tested, chosen, one_token, options)
    same = sum(o.token_ids == t.outcome.token_ids for o, t in zip(plain, traces, strict=False))
    cut = sum(t.outcome.finish_reason == "capacity" for t in traces)
    return Calibration(
        options, plan.judges, len(plan.tasks), plan.too_long, cut, _range(plan.prompt_tokens), _range(answers), one_token, len(plain), same,
        recorded, tuple(sorted(curve, key=lambda p: (p.metric, p.tokens_per_forward))), tuple(tested), chosen, tuple(notes),
    )  # fmt: skip


def _sequence(
    calibrator: Calibrator,
    plan: Plan,
    traces: Sequence[Trace],
    qualities: np.ndarray,
    options: CalibrationOptions,
    metric: str,
) -> Iterator[Tested]:
    """Test a metric's candidates from safe to fast, up to and with the first that does not pass."""
    for tau in options.candidates(metric):
        outcomes = calibrator.outcomes(plan.tasks, GenerationConfig(tau=tau, metric=metric))
        scores = _scores(plan.tasks, outcomes, traces, qualities)
        agreement = sum(
            o.token_ids == t.outcome.token_ids for o, t in zip(outcomes, traces, strict=True)
        ) / len(traces)
        drops = qualities - scores
        p_value = float(bounds.p_value(drops, options.max_drop, options.level))
        passed = p_value <= options.level
        predicted = _predict(plan, traces, calibrator.session, metric, tau)
        measured = measure(metric, tau, outcomes, scores, agreement, options)
        yield Tested(
            measured,
            float(drops.mean()),
            bounds.upper_bound(drops, options.level),
            p_value,
            passed,
            predicted,
        )
        if not passed:
            return


def _predict(plan: Plan, traces: Sequence[Trace], session: Session, metric: str, tau: float) -> Prediction:
    return predict(traces, plan.limits, metric, tau, session.bundle.manifest.tokens.eos)


def _scores(
    tasks: Sequence[Task], outcomes: Sequence[Outcome], traces: Sequence[Trace], qualities: np.ndarray
) -> np.ndarray:
    """Score each outcome; the same answer gets the same score without being judged again."""
    scores = qualities.copy()
    for i, (task, outcome, trace) in enumerate(zip(tasks, outcomes, traces, strict=True)):
        if outcome.output != trace.outcome.output:
            scores[i] = task.score(outcome.output, trace.outcome.output)
    return scores


def measure(
    metric: str,
    tau: float,
    outcomes: Sequence[Outcome],
    scores: np.ndarray,
    agreement: float,
    options: CalibrationOptions,
) -> Measured:
    """What rows decoded at one setting gave and cost. `scores` may be those of more rows than were decoded."""
    tokens, forwards = sum(len(o.token_ids) for o in outcomes), sum(o.forwards for o in outcomes)
    timed, seconds = sum(o.tokens_timed for o in outcomes), sum(o.seconds for o in outcomes)
    speed = timed / seconds if seconds > 0 else 0.0
    ends = bounds.interval(scores, 1 - options.confidence)
    return Measured(
        metric,
        tau,
        len(scores),
        float(scores.mean()),
        ends,
        agreement,
        tokens / forwards if forwards else 0.0,
        speed,
    )


def _fastest(tested: Sequence[Tested]) -> Tested | None:
    """Of all that passed, the one with the most tokens per forward: within a metric that is the last."""
    passed = [t for t in tested if t.passed]
    return max(passed, key=lambda t: t.measured.tokens_per_forward) if passed else None


def _reasons_not_to_test(plan: Plan, answers: Sequence[int], options: CalibrationOptions) -> list[str]:
    rows, needed = len(plan.tasks), options.items_needed
    notes = []
    if rows < needed:
        notes.append(
            f"{rows} rows cannot show a drop below {options.max_drop:g} with {100 * (1 - options.level):.3g} % confidence, even if none changes:"
            f" {needed} are needed. tau stays 1"
        )
    if are_short(answers):
        notes.append(
            f"half of the answers have {int(np.median(answers))} tokens or fewer: tau cannot help there. tau stays 1"
        )
    return notes


def _remarks(
    plan: Plan,
    tested: Sequence[Tested],
    chosen: Tested | None,
    one_token: Measured,
    options: CalibrationOptions,
) -> list[str]:
    notes = []
    if plan.too_long:
        rows = ", ".join(map(str, plan.too_long[:10])) + (", ..." if len(plan.too_long) > 10 else "")
        notes.append(
            f"{len(plan.too_long)} rows were left out, their prompts are longer than the context: {rows}"
        )
    if tested and chosen is None:
        notes.append(
            f"the safest candidate did not pass: tau stays 1. More rows, or a larger bound than {options.max_drop:g}, may help"
        )
    if chosen is not None and chosen.measured.tokens_per_second < one_token.tokens_per_second:
        notes.append(
            "the chosen tau was not faster than one-token mode here: too few predictions are accepted to pay for the masks"
        )
    return notes


def _range(values: Sequence[int]) -> tuple[int, int]:
    return min(values), max(values)
