"""The calibration: test paired decodes from safe to fast, choose the fastest that passed, and compare it with
exact mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import numpy as np

from ...runtime.decode.config import GenerationConfig
from ...runtime.session.session import Session
from ..journal import Journal
from ..rounds import Progress, Rounds, percent
from ..rows import Plan
from ..tasks.scores import edit_similarity
from ..tasks.tasks import TaskRow
from . import bounds, race
from .decoding import Outcome, decode_rows, num_same
from .exact import ExactMode, compare_exact
from .options import EXACT, ONE_TOKEN, CalibrationOptions, name_of, setting

CHECK_ROWS = 32  # rows decoded in exact mode, to compare with one-token mode
SHORT_ANSWER = 4  # tokens, too few for several to be accepted together
MAX_CHANGES = 50
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
    def config(self) -> GenerationConfig:
        return setting(self.tau, self.metric)

    @property
    def name(self) -> str:
        return name_of(self.config)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate: its figures, its paired drop against one-token mode, whether the bound was shown, and, if
    it passed, its speed-up over one-token mode in interleaved rounds."""

    measured: Figures
    drop: float
    drop_bound: float
    p_value: float
    passed: bool
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
    tested: tuple[Candidate, ...]
    chosen: Candidate | None  # None: no setting was shown to be faster than tau 1 within the bound
    choice: str | None  # the reason of the choice; None if no setting passed
    changed: tuple[Change, ...]  # its changed answers, the worst first, at most MAX_CHANGES
    exact: ExactMode
    notes: tuple[str, ...]


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

    def outcomes(self, tasks: Sequence[TaskRow], config: GenerationConfig) -> list[Outcome]:
        phase, journal = name_of(config), self.journal
        keys = [f"{phase}/{task.digest[:24]}" for task in tasks]
        missing = {key: task for key, task in zip(keys, tasks, strict=True) if key not in journal}
        done = len(tasks) - len(missing)
        self.report(phase, done, len(tasks))
        outcomes = decode_rows(self.session, list(missing.values()), config, self.options.batch)
        for key, outcome in zip(missing, outcomes, strict=True):
            journal[key] = asdict(outcome)
            done += 1
            self.report(phase, done, len(tasks))
        kept = [journal[key] for key in keys]
        return [Outcome(**row | {"token_ids": tuple(row["token_ids"])}) for row in kept]

    def speeds(self, tasks: Sequence[TaskRow], settings: dict[str, GenerationConfig]) -> race.Speeds:
        return race.race(self.session, self.journal, tasks, settings, self.options.batch, self.report)


def calibrate(calibrator: Calibrator, plan: Plan) -> Calibration:
    """Find the fastest tau whose quality drop on tasks like these is below the bound, with the confidence of
    the options.

    Fixed-sequence testing (Learn then Test, Angelopoulos et al. 2021): candidates are tested from safe to
    fast at the full level, and the first that does not pass ends the sequence. So the probability of passing
    any that should not pass is at most the level. This covers all candidates that passed, so any of them may
    be chosen, for example by speed.
    """
    options = calibrator.options
    references = calibrator.outcomes(plan.tasks, ONE_TOKEN)
    answers = [len(outcome.token_ids) for outcome in references]
    qualities = _scores(plan.tasks, references, references)
    exact = _exact_rows(calibrator, plan, references)
    num_exact = len(exact)
    exact_scores = _scores(plan.tasks[:num_exact], exact, references[:num_exact], qualities[:num_exact])
    one_token = figures(ONE_TOKEN, references, qualities, 1.0, options.confidence)
    reasons = _reasons_not_to_test(plan, answers, options)
    trials: list[Candidate] = []
    for metric in () if reasons else options.metrics:
        trials += _sequence(calibrator, plan, references, qualities, metric)
    speeds = _speeds(calibrator, plan, trials)
    one_token, trials = _timed(speeds, one_token, trials)
    choice, reason = None, None
    if any(trial.passed for trial in trials):
        choice, reason = _fastest(speeds, trials)
    changes: list[Change] = []
    if choice is not None:
        outcomes = calibrator.outcomes(plan.tasks, choice.measured.config)
        changes = changes_of(plan.tasks, references, outcomes)
    return Calibration(
        options=options,
        judges=plan.judges,
        num_rows=len(plan.tasks),
        too_long=plan.too_long,
        cut_short=sum(outcome.finish_reason == "capacity" for outcome in references),
        prompt_range=plan.prompt_range,
        answer_range=(min(answers), max(answers)),
        one_token=one_token,
        tested=tuple(trials),
        chosen=choice,
        choice=reason,
        changed=tuple(changes[:MAX_CHANGES]),
        exact=compare_exact(
            speeds,
            exact,
            references,
            qualities[:num_exact] - exact_scores,
            (one_token.quality, one_token.quality_interval),
            choice.measured.name if choice else name_of(ONE_TOKEN),
            options,
        ),
        notes=(*reasons, *_notes(plan, trials, references, options)),
    )


def figures(
    config: GenerationConfig, outcomes: Outcomes, scores: np.ndarray, agreement: float, confidence: float
) -> Figures:
    """The figures of rows at one setting."""
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
    calibrator: Calibrator, plan: Plan, references: Outcomes, qualities: np.ndarray, metric: str
) -> Iterator[Candidate]:
    """Test a metric's candidates from safe to fast, up to and including the first that does not pass."""
    options = calibrator.options
    for tau in options.candidates(metric):
        outcomes = calibrator.outcomes(plan.tasks, setting(tau, metric))
        scores = _scores(plan.tasks, outcomes, references, qualities)
        drops = qualities - scores
        p_value = float(bounds.p_value(drops, options.max_drop, options.level))
        passed = p_value <= options.level
        agreement = num_same(outcomes, references) / len(references)
        yield Candidate(
            figures(setting(tau, metric), outcomes, scores, agreement, options.confidence),
            float(drops.mean()),
            bounds.upper_bound(drops, options.level),
            p_value,
            passed,
        )
        if not passed:
            return


def _speeds(calibrator: Calibrator, plan: Plan, trials: Sequence[Candidate]) -> race.Speeds:
    """The speeds of one-token mode, the trials that passed and exact mode. A setting counts as safer the more
    of its answers are the one-token answers."""
    passed = sorted((t for t in trials if t.passed), key=lambda t: -t.measured.agreement)
    configs = [ONE_TOKEN, *(trial.measured.config for trial in passed), EXACT]
    return calibrator.speeds(plan.tasks, {name_of(config): config for config in configs})


def _timed(
    speeds: race.Speeds, one_token: Figures, trials: Sequence[Candidate]
) -> tuple[Figures, list[Candidate]]:
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


def _fastest(speeds: race.Speeds, trials: Sequence[Candidate]) -> tuple[Candidate | None, str]:
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
    tasks: Sequence[TaskRow], outcomes: Outcomes, references: Outcomes, qualities: np.ndarray | None = None
) -> np.ndarray:
    """Score each outcome. With the references' `qualities`, equal answers are not judged again."""
    scores = np.zeros(len(tasks)) if qualities is None else qualities.copy()
    for i, (task, outcome, reference) in enumerate(zip(tasks, outcomes, references, strict=True)):
        if qualities is None or outcome.output != reference.output:
            scores[i] = task.score(outcome.output, reference.output)
    return scores


def changes_of(tasks: Sequence[TaskRow], references: Outcomes, outcomes: Outcomes) -> list[Change]:
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
    plan: Plan, trials: Sequence[Candidate], references: Outcomes, options: CalibrationOptions
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
            " tokens per forward, cost no forward, and no rule accepted them"
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
