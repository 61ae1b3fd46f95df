"""The calibration: record, predict, test paired decodes from safe to fast, choose the fastest that passed,
and compare it with exact mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

import numpy as np

from ...runtime.decode.config import GenerationConfig
from ...runtime.session.session import Session
from ..journal import Journal
from ..rounds import Progress, Rounds, percent
from ..rows import Plan
from ..tasks.scores import edit_similarity
from ..tasks.tasks import Task
from . import bounds, race
from .decoding import Outcome, decode_rows
from .exact import ExactMode, beside, num_same
from .options import EXACT, GRID, ONE_TOKEN, CalibrationOptions, name_of, setting
from .record import Trace, record, recorded_metrics
from .replay import Prediction, predict

CHECK_ROWS = 32  # rows decoded in plain one-token mode and in exact mode, to compare with the record pass
SHORT_ANSWER = 4  # tokens, too few for several to be accepted together
MOST_CHANGES = 50
T = TypeVar("T")
Outcomes = Sequence[Outcome]


@dataclass(frozen=True, slots=True)
class Figures:
    """Rows decoded at one setting. Qualities are means of 0 to 1 with a confidence interval.

    `tokens_per_second` is measured in the interleaved rounds if the setting took part in them. Otherwise it
    is that of decoding without prompts for single rows, and of everything for batches.
    """

    metric: str
    tau: float
    num_rows: int
    quality: float
    quality_interval: tuple[float, float]
    agreement: float
    tokens_per_forward: float
    tokens_per_second: float

    @property
    def name(self) -> str:
        return f"tau {self.tau:g}" if self.metric == "probability" else f"{self.metric} {self.tau:g}"


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate: its figures, its paired drop against one-token mode, whether the bound was shown, and, if
    it passed, its speed-up over one-token mode in interleaved rounds."""

    measured: Figures
    drop: float
    drop_bound: float
    p_value: float
    passed: bool
    predicted: Prediction
    speed_up: Rounds | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """A row whose answer at the chosen setting differs from the one-token answer, with the scores of both."""

    row: int
    prompt: str
    before: str
    after: str
    score_before: float
    score_after: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The result of a calibration."""

    options: CalibrationOptions
    judges: str
    num_rows: int
    too_long: tuple[int, ...]
    cut_short: int
    prompt_range: tuple[int, int]
    answer_range: tuple[int, int]
    one_token: Figures
    speed_rows: int
    speed_rows_same: int
    recorded: tuple[str, ...]
    curve: tuple[Prediction, ...]
    tested: tuple[Trial, ...]
    chosen: Trial | None  # None: no setting was shown to be faster than tau 1 within the bound
    notes: tuple[str, ...]
    choice: str | None = None  # the reason of the choice
    changed: tuple[Change, ...] = ()  # its changed answers, the worst first, at most MOST_CHANGES
    exact: ExactMode | None = None  # None in older reports

    @property
    def config(self) -> GenerationConfig:
        """The chosen setting."""
        return setting(self.chosen.measured.tau, self.chosen.measured.metric) if self.chosen else ONE_TOKEN


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The choice against one-token mode on other rows. Tested once, so the bound needs no correction."""

    one_token: Figures
    chosen: Figures
    drop: float
    drop_bound: float
    held: bool


class Calibrator:
    """Decodes with a journal: rows that it holds are not decoded again."""

    def __init__(
        self,
        session: Session,
        journal: Journal,
        options: CalibrationOptions,
        progress: Progress | None = None,
    ) -> None:
        self.session, self.journal, self.options = session, journal, options
        self.report: Progress = progress or (lambda phase, done, total: None)

    def traces(self, tasks: Sequence[Task]) -> list[Trace]:
        return self._all("record", tasks, lambda rows: record(self.session, rows, self.options.batch), Trace)

    def outcomes(self, tasks: Sequence[Task], config: GenerationConfig) -> list[Outcome]:
        def decode(rows: Sequence[Task]) -> Iterator[Outcome]:
            return decode_rows(self.session, rows, config, self.options.batch)

        is_tau = not (config.exact or config.one_token)
        phase = f"{config.metric} {config.tau:g}" if is_tau else name_of(config)
        return self._all(phase, tasks, decode, Outcome)

    def speeds(self, tasks: Sequence[Task], settings: dict[str, GenerationConfig]) -> race.Speeds:
        return race.race(self.session, self.journal, tasks, settings, self.options.batch, self.report)

    def predict(self, plan: Plan, traces: Sequence[Trace], metric: str, tau: float) -> Prediction:
        limits = [task.max_new_tokens for task in plan.tasks]
        return predict(traces, limits, metric, tau, self.session.bundle.manifest.tokens.eos)

    def _all(
        self, phase: str, tasks: Sequence[Task], work: Callable[[Sequence[Task]], Iterable[T]], kind: type[T]
    ) -> list[T]:
        keys = [f"{phase}/{task.digest[:24]}" for task in tasks]
        missing = {key: task for key, task in zip(keys, tasks, strict=True) if key not in self.journal}
        done = len(tasks) - len(missing)
        self.report(phase, done, len(tasks))
        for key, value in zip(missing, work(list(missing.values())), strict=True):
            self.journal[key] = value
            done += 1
            self.report(phase, done, len(tasks))
        return [self.journal.read(key, kind) for key in keys]


def calibrate(calibrator: Calibrator, plan: Plan) -> Calibration:
    """Find the fastest tau whose quality drop on tasks like these is below the bound, with the confidence of
    the options.

    Fixed-sequence testing (Learn then Test, Angelopoulos et al. 2021): candidates are tested from safe to
    fast at the full level, and the first that does not pass ends the sequence. So the probability of passing
    any that should not pass is at most the level. This covers all candidates that passed, so any of them may
    be chosen, for example by speed.
    """
    options, recorded = calibrator.options, recorded_metrics(calibrator.session)
    traces = calibrator.traces(plan.tasks)
    references = [trace.outcome for trace in traces]
    answers = [len(outcome.token_ids) for outcome in references]
    qualities = _scores(plan.tasks, references, references)
    grid = [(metric, tau) for metric in recorded for tau in {*GRID[metric], *options.taus}]
    curve = [calibrator.predict(plan, traces, metric, tau) for metric, tau in grid]
    plain = calibrator.outcomes(plan.tasks[:CHECK_ROWS], ONE_TOKEN)
    exact = _exact_rows(calibrator, plan, references)
    num_exact = len(exact)
    exact_scores = _scores(plan.tasks[:num_exact], exact, references[:num_exact], qualities[:num_exact])
    one_token = figures(ONE_TOKEN, plain, qualities, 1.0, options.confidence)
    reasons = _reasons_not_to_test(plan, answers, options)
    trials: list[Trial] = []
    for metric in () if reasons else options.metrics:
        trials += _sequence(calibrator, plan, traces, qualities, metric)
    speeds = _speeds(calibrator, plan, trials)
    one_token, trials = _timed(speeds, one_token, trials)
    choice, reason = None, None
    if any(trial.passed for trial in trials):
        choice, reason = _fastest(speeds, trials)
    changes: list[Change] = []
    if choice is not None:
        config = setting(choice.measured.tau, choice.measured.metric)
        changes = changes_of(plan.tasks, references, calibrator.outcomes(plan.tasks, config))
    return Calibration(
        options=options,
        judges=plan.judges,
        num_rows=len(plan.tasks),
        too_long=plan.too_long,
        cut_short=sum(outcome.finish_reason == "capacity" for outcome in references),
        prompt_range=plan.prompt_range,
        answer_range=(min(answers), max(answers)),
        one_token=one_token,
        speed_rows=len(plain),
        speed_rows_same=num_same(plain, references),
        recorded=recorded,
        curve=tuple(sorted(curve, key=lambda p: (p.metric, p.tokens_per_forward))),
        tested=tuple(trials),
        chosen=choice,
        notes=(*reasons, *_notes(plan, trials, references, options)),
        choice=reason,
        changed=tuple(changes[:MOST_CHANGES]),
        exact=beside(
            speeds,
            exact,
            references,
            qualities[:num_exact] - exact_scores,
            (one_token.quality, one_token.quality_interval),
            choice.measured.name if choice else name_of(ONE_TOKEN),
            options,
        ),
    )


def confirm(calibrator: Calibrator, plan: Plan, config: GenerationConfig) -> Confirmation:
    """Decode other rows in one-token mode and at `config`. `held`: their mean drop is at most the bound."""
    options = calibrator.options
    plain = calibrator.outcomes(plan.tasks, ONE_TOKEN)
    fast = plain if config.one_token else calibrator.outcomes(plan.tasks, config)
    before, after = _scores(plan.tasks, plain, plain), _scores(plan.tasks, fast, plain)
    drops = before - after
    return Confirmation(
        figures(ONE_TOKEN, plain, before, 1.0, options.confidence),
        figures(config, fast, after, _agreement(fast, plain), options.confidence),
        float(drops.mean()),
        bounds.upper_bound(drops, 1 - options.confidence),
        bool(drops.mean() <= options.max_drop),
    )


def figures(
    config: GenerationConfig, outcomes: Outcomes, scores: np.ndarray, agreement: float, confidence: float
) -> Figures:
    """The figures of rows at one setting. `scores` may include rows that were not decoded."""
    tokens, forwards = sum(len(o.token_ids) for o in outcomes), sum(o.forwards for o in outcomes)
    timed, seconds = sum(o.tokens_timed for o in outcomes), sum(o.seconds for o in outcomes)
    assert config.tau is not None, "exact mode is an ExactMode"
    return Figures(
        config.metric,
        config.tau,
        len(scores),
        float(scores.mean()),
        bounds.interval(scores, 1 - confidence),
        agreement,
        tokens / forwards if forwards else 0.0,
        timed / seconds if seconds > 0 else 0.0,
    )


def _sequence(
    calibrator: Calibrator, plan: Plan, traces: Sequence[Trace], qualities: np.ndarray, metric: str
) -> Iterator[Trial]:
    """Test a metric's candidates from safe to fast, up to and including the first that does not pass."""
    options, references = calibrator.options, [trace.outcome for trace in traces]
    for tau in options.candidates(metric):
        outcomes = calibrator.outcomes(plan.tasks, setting(tau, metric))
        scores = _scores(plan.tasks, outcomes, references, qualities)
        drops = qualities - scores
        p_value = float(bounds.p_value(drops, options.max_drop, options.level))
        passed = p_value <= options.level
        same = _agreement(outcomes, references)
        yield Trial(
            figures(setting(tau, metric), outcomes, scores, same, options.confidence),
            float(drops.mean()),
            bounds.upper_bound(drops, options.level),
            p_value,
            passed,
            calibrator.predict(plan, traces, metric, tau),
        )
        if not passed:
            return


def _speeds(calibrator: Calibrator, plan: Plan, trials: Sequence[Trial]) -> race.Speeds:
    """The speeds of one-token mode, the trials that passed and exact mode. A setting counts as safer the more
    of its answers are the one-token answers."""
    passed = sorted((t for t in trials if t.passed), key=lambda t: -t.measured.agreement)
    configs = [ONE_TOKEN, *(setting(t.measured.tau, t.measured.metric) for t in passed), EXACT]
    return calibrator.speeds(plan.tasks, {name_of(config): config for config in configs})


def _timed(speeds: race.Speeds, one_token: Figures, trials: Sequence[Trial]) -> tuple[Figures, list[Trial]]:
    """One-token mode and the trials that passed, with their speeds in the same rounds."""
    ratios = race.speed_ups(speeds)

    def timed(point: Figures, name: str) -> Figures:
        return replace(point, tokens_per_second=median(speeds[name]))

    raced = [
        replace(t, measured=timed(t.measured, t.measured.name), speed_up=ratios[t.measured.name])
        if t.passed
        else t
        for t in trials
    ]
    return timed(one_token, name_of(ONE_TOKEN)), raced


def _fastest(speeds: race.Speeds, trials: Sequence[Trial]) -> tuple[Trial | None, str]:
    """The choice among one-token mode and the taus that passed, and why."""
    name, reason = race.choose({name: values for name, values in speeds.items() if name != name_of(EXACT)})
    return next((t for t in trials if t.passed and t.measured.name == name), None), reason


def _exact_rows(calibrator: Calibrator, plan: Plan, references: Outcomes) -> list[Outcome]:
    """The first rows in exact mode, or all rows if some of the first differ from the one-token text."""
    first = calibrator.outcomes(plan.tasks[:CHECK_ROWS], EXACT)
    if num_same(first, references) == len(first):
        return first
    return calibrator.outcomes(plan.tasks, EXACT)


def _scores(
    tasks: Sequence[Task], outcomes: Outcomes, references: Outcomes, qualities: np.ndarray | None = None
) -> np.ndarray:
    """Score each outcome. With the references' `qualities`, equal answers are not judged again."""
    scores = np.zeros(len(tasks)) if qualities is None else qualities.copy()
    for i, (task, outcome, reference) in enumerate(zip(tasks, outcomes, references, strict=True)):
        if qualities is None or outcome.output != reference.output:
            scores[i] = task.score(outcome.output, reference.output)
    return scores


def _agreement(outcomes: Outcomes, references: Outcomes) -> float:
    """Share of answers with the same tokens."""
    return num_same(outcomes, references) / len(references)


def changes_of(tasks: Sequence[Task], references: Outcomes, outcomes: Outcomes) -> list[Change]:
    """All changed answers: those that lost most first, then those that changed most."""
    changes = []
    for task, before, after in zip(tasks, references, outcomes, strict=True):
        if before.token_ids != after.token_ids:
            scores = (task.score(o.output, before.output) for o in (before, after))
            change = Change(task.number, task.shown, before.text, after.text, *scores)
            changes.append((change, edit_similarity(after.output, before.output)))
    changes.sort(key=lambda pair: (pair[0].score_after - pair[0].score_before, pair[1], pair[0].row))
    return [change for change, _ in changes]


def _notes(
    plan: Plan, trials: Sequence[Trial], references: Outcomes, options: CalibrationOptions
) -> Iterator[str]:
    """Warnings for readers of the report."""
    if trials and not any(trial.passed for trial in trials):
        yield (
            "the safest candidate did not pass: tau stays 1. More rows, or a larger bound than"
            f" {options.max_drop:g}, may help"
        )
    if plan.too_long:
        rows = ", ".join(map(str, plan.too_long[:10])) + (", ..." if len(plan.too_long) > 10 else "")
        yield f"{len(plan.too_long)} rows were left out, their prompts are longer than the context: {rows}"
    if forced := sum(outcome.forced for outcome in references):
        share = forced / sum(len(outcome.token_ids) for outcome in references)
        yield (
            f"{percent(share)} of the one-token answers' tokens came from the rows' grammars: they count in"
            " tokens per forward, cost no forward, and no rule accepted them; the predicted speed assumes"
            " masks right after the cursor, so a real decode is faster"
        )


def _reasons_not_to_test(plan: Plan, answers: Sequence[int], options: CalibrationOptions) -> list[str]:
    rows, needed, usual = len(plan.tasks), options.items_needed, median(answers)
    notes = []
    if rows < needed:
        notes.append(
            f"{rows} rows cannot show a drop below {options.max_drop:g} with {100 * (1 - options.level):.3g}"
            f" % confidence, even if none changes: {needed} are needed. tau stays 1"
        )
    if usual <= SHORT_ANSWER:
        notes.append(
            f"half of the answers have {int(usual)} tokens or fewer: tau cannot help there. tau stays 1"
        )
    return notes
