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
from .clock import Clock, row_seconds
from .decoding import Outcome, decode_rows, num_same
from .exact import ExactMode, compare_exact
from .options import EXACT, ONE_TOKEN, CalibrationOptions, name_of, setting

CHECK_ROWS = 32  # rows decoded in exact and in one-token mode, to compare their texts
BATCH = 8  # rows decoded together, if answers do not depend on it
SPEED_ROWS = 32  # at least; four times the batch if that is more: for predicted speeds
SHORT_ANSWER = 4  # tokens, too few for several to be accepted together
MAX_CHANGES = 50
Outcomes = Sequence[Outcome]


@dataclass(frozen=True, slots=True)
class Figures:
    """Rows decoded at one setting. Qualities are means of 0 to 1 with a confidence interval.

    `tokens_per_second` is measured in the interleaved rounds if the setting took part in them. Otherwise it
    is predicted from the rows' forwards and the cost of a step.
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
    it was among the fastest, its speed-up over one-token mode in interleaved rounds."""

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
        self._progress, self._clock, self._tokens = progress, Clock({}, 0.0), 0
        variant = session.variant
        # An answer then does not depend on the rows beside it, and exact mode has the one-token text.
        self.is_batch_invariant = (
            session.device == "cpu" and not variant.is_engine and variant.is_batch_invariant
        )
        self.batch = max(BATCH, options.batch) if self.is_batch_invariant else options.batch

    def plan(self, tasks: Sequence[TaskRow]) -> None:
        """Report the drop that these rows can show, and the most time that all phases may take."""
        options, text, count = self.options, self.session.text, len(tasks)
        answers = [len(text.encode_part(t.answer)) if t.answer and text else t.max_new_tokens for t in tasks]
        prompt = sum(len(task.prompt_ids or ()) for task in tasks) / count
        tokens = max(1.0, sum(answers) / count)
        forwards = max(1.0, 2 * tokens / (1 + self.session.bundle.manifest.block))
        taus = [setting(tau, metric) for metric in options.metrics for tau in options.candidates(metric)]
        modes = (EXACT, ONE_TOKEN) if self.is_batch_invariant else (ONE_TOKEN, EXACT)
        rows = dict.fromkeys(map(name_of, (*modes, *taus)), count) | {name_of(modes[1]): CHECK_ROWS}
        rows[race.PHASE] = 3 * race.ROUNDS * race.num_rows(count, options.batch)
        seconds = row_seconds(self.session, EXACT, self.batch, prompt, tokens, forwards)
        self._clock = Clock(rows, seconds)
        shown = bounds.upper_bound(np.zeros(count), options.level)
        can = f"{count} rows can show a drop below {shown:.2g} if no answer gets worse"
        self._tell("rows", 0, 0, f"{can}; this takes at most about {self._clock}")

    def report(self, phase: str, done: int, total: int) -> None:
        self._clock.at(phase, done, total)
        self._tell(phase, done, total, f"{self._tokens} tokens, at most {self._clock} left")

    def _tell(self, phase: str, done: int, total: int, note: str) -> None:
        if self._progress is not None:
            self._progress(phase, done, total, note)

    def outcomes(
        self, tasks: Sequence[TaskRow], config: GenerationConfig, safer: Outcomes = ()
    ) -> list[Outcome]:
        """The rows at a setting. Those of a safer tau that hold at this one, too, are not decoded again."""
        phase, journal = name_of(config), self.journal
        keys = [f"{phase}/{task.digest[:24]}" for task in tasks]
        is_repeatable = self.is_batch_invariant or self.batch == 1
        for key, task, outcome in zip(keys, tasks, safer if is_repeatable else (), strict=False):
            if key not in journal and not task.form and outcome.holds_at(config):
                journal[key] = asdict(outcome)
        missing = {key: task for key, task in zip(keys, tasks, strict=True) if key not in journal}
        done = len(tasks) - len(missing)
        self.report(phase, done, len(tasks))
        outcomes = decode_rows(self.session, list(missing.values()), config, self.batch)
        for key, outcome in zip(missing, outcomes, strict=True):
            journal[key] = asdict(outcome)
            done, self._tokens = done + 1, self._tokens + len(outcome.token_ids)
            self.report(phase, done, len(tasks))
        return self.known(tasks, config)

    def known(self, tasks: Sequence[TaskRow], config: GenerationConfig) -> list[Outcome]:
        """The rows that were decoded at a setting."""
        kept = [self.journal[f"{name_of(config)}/{task.digest[:24]}"] for task in tasks]
        return [Outcome(**row | {"token_ids": tuple(row["token_ids"])}) for row in kept]

    def predicted_speed(
        self, tasks: Sequence[TaskRow], config: GenerationConfig, outcomes: Outcomes
    ) -> float:
        """Tokens per second of the first rows at the batch of the options."""
        batch, tokens, seconds = self.options.batch, 0, 0.0
        for task, outcome in list(zip(tasks, outcomes, strict=True))[: max(SPEED_ROWS, 4 * batch)]:
            counts = len(task.prompt_ids or ()), len(outcome.token_ids), outcome.forwards
            tokens += len(outcome.token_ids)
            seconds += row_seconds(self.session, config, batch, *counts)
        return tokens / seconds

    def race(self, tasks: Sequence[TaskRow], settings: dict[str, GenerationConfig]) -> race.Laps:
        return race.race(self.session, tasks, settings, self.options.batch, self.report)


def calibrate(calibrator: Calibrator, plan: Plan) -> Calibration:
    """Find the fastest tau whose quality drop on tasks like these is below the bound, with the confidence of
    the options.

    Fixed-sequence testing (Learn then Test, Angelopoulos et al. 2021): candidates are tested from safe to
    fast at the full level, and the first that does not pass ends the sequence. So the probability of passing
    any that should not pass is at most the level. This covers all candidates that passed, so any of them may
    be chosen, for example by speed.
    """
    options = calibrator.options
    calibrator.plan(plan.tasks)
    references, one_token_rows, exact = _references(calibrator, plan.tasks)
    answers = [len(outcome.token_ids) for outcome in references]
    qualities = _scores(plan.tasks, references, references)
    num_exact = len(exact)
    exact_scores = _scores(plan.tasks[:num_exact], exact, references[:num_exact], qualities[:num_exact])
    one_token = figures(ONE_TOKEN, one_token_rows, qualities, 1.0, options.confidence)
    reasons = _reasons_not_to_test(answers)
    trials: list[Candidate] = []
    for metric in () if reasons else options.metrics:
        trials += _sequence(calibrator, plan, references, qualities, metric)
    laps = _race(calibrator, plan, trials)
    one_token, trials = _timed(laps, one_token, trials)
    choice, reason = None, None
    if any(trial.passed for trial in trials):
        choice, reason = _fastest(laps, trials)
    changes: list[Change] = []
    if choice is not None:
        changes = changes_of(plan.tasks, references, calibrator.known(plan.tasks, choice.measured.config))
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
            laps,
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
    config: GenerationConfig,
    outcomes: Outcomes,
    scores: np.ndarray,
    agreement: float,
    confidence: float,
    speed: float = 0.0,
) -> Figures:
    """The figures of rows at one setting."""
    tokens, forwards = sum(len(o.token_ids) for o in outcomes), sum(o.forwards for o in outcomes)
    assert config.tau is not None, "exact mode is an ExactMode"
    return Figures(
        config.metric,
        config.tau,
        len(scores),
        float(scores.mean()),
        bounds.interval(scores, 1 - confidence),
        agreement,
        tokens / forwards if forwards else 0.0,
        speed,
    )


def _sequence(
    calibrator: Calibrator, plan: Plan, references: Outcomes, qualities: np.ndarray, metric: str
) -> Iterator[Candidate]:
    """Test a metric's candidates from safe to fast, up to and including the first that does not pass."""
    options = calibrator.options
    outcomes: list[Outcome] = []
    for tau in options.candidates(metric):
        config = setting(tau, metric)
        outcomes = calibrator.outcomes(plan.tasks, config, outcomes)
        scores = _scores(plan.tasks, outcomes, references, qualities)
        drops = qualities - scores
        p_value = float(bounds.p_value(drops, options.max_drop, options.level))
        passed = p_value <= options.level if options.guarantee else drops.mean() < options.max_drop
        agreement = num_same(outcomes, references) / len(references)
        speed = calibrator.predicted_speed(plan.tasks, config, outcomes)
        yield Candidate(
            figures(config, outcomes, scores, agreement, options.confidence, speed),
            float(drops.mean()),
            bounds.upper_bound(drops, options.level),
            p_value,
            bool(passed),
        )
        if not passed:
            return


def _race(calibrator: Calibrator, plan: Plan, trials: Sequence[Candidate]) -> race.Laps:
    """The laps of one-token mode, exact mode and the safest of the fastest trials that passed.

    Taus differ in their forwards, which are counted, at nearly the same widths: the cost of a step compares
    them better than a clock. A setting is safer the more of its answers are the one-token answers.
    """
    passed = sorted((t.measured for t in trials if t.passed), key=lambda point: -point.agreement)
    name = race.safest_tie({p.name: p.tokens_per_second for p in passed}) if passed else None
    configs = [ONE_TOKEN, *(point.config for point in passed if point.name == name), EXACT]
    return calibrator.race(plan.tasks, {name_of(config): config for config in configs})


def _timed(laps: race.Laps, one_token: Figures, trials: list[Candidate]) -> tuple[Figures, list[Candidate]]:
    """One-token mode and the trial that was raced, with their speeds in the same rounds; the predictions of
    other trials are scaled alike."""
    ratios, scale = race.speed_ups(laps), 1.0

    def timed(point: Figures) -> Figures:
        return replace(point, tokens_per_second=race.tokens_per_second(laps, point.name))

    for point in (trial.measured for trial in trials if trial.measured.name in laps):
        scale = timed(point).tokens_per_second / point.tokens_per_second
    for i, trial in enumerate(trials):
        point = replace(trial.measured, tokens_per_second=scale * trial.measured.tokens_per_second)
        trials[i] = replace(trial, measured=point, speed_up=ratios.get(point.name))
    return timed(one_token), trials


def _fastest(laps: race.Laps, trials: Sequence[Candidate]) -> tuple[Candidate | None, str]:
    """The choice among one-token mode and the taus that passed, and why."""
    name, reason = race.choose({name: rounds for name, rounds in laps.items() if name != name_of(EXACT)})
    if others := sum(t.passed and t.speed_up is None for t in trials):
        reason += (
            f"; by their forwards, {others} others that passed are slower, or tie with it and are riskier"
        )
    return next((t for t in trials if t.passed and t.measured.name == name), None), reason


def _references(
    calibrator: Calibrator, tasks: Sequence[TaskRow]
) -> tuple[list[Outcome], list[Outcome], list[Outcome]]:
    """The one-token answers of all rows, and the rows decoded in one-token and in exact mode.

    In a batch-invariant bundle exact mode gives the answers, in a fraction of the steps. One of the modes
    decodes the first rows only if their texts are the same in both, otherwise all rows.
    """
    first, is_invariant = tasks[:CHECK_ROWS], calibrator.is_batch_invariant
    if is_invariant:
        exact, one_token = calibrator.outcomes(tasks, EXACT), calibrator.outcomes(first, ONE_TOKEN)
    else:
        one_token, exact = calibrator.outcomes(tasks, ONE_TOKEN), calibrator.outcomes(first, EXACT)
    if num_same(one_token, exact) == len(first):
        return (exact if is_invariant else one_token), one_token, exact[: len(first)]
    calibrator.is_batch_invariant, calibrator.batch = False, calibrator.options.batch
    one_token = calibrator.outcomes(tasks, ONE_TOKEN)
    return one_token, one_token, calibrator.outcomes(tasks, EXACT)


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
    """All changed answers, sorted by the score they lost, then by how much they changed."""
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
    if not options.guarantee:
        yield "--no-guarantee: the mean drop of these rows decided, and other rows may lose more"
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


def _reasons_not_to_test(answers: Sequence[int]) -> list[str]:
    usual = median(answers)
    if usual > SHORT_ANSWER:
        return []
    return [f"half of the answers have {int(usual)} tokens or fewer: tau cannot help there. tau stays 1"]
