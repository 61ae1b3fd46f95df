"""The calibration: test paired decodes from safe to fast, choose the fastest that passed, and compare it with
exact mode."""

from __future__ import annotations

import math
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
from .decoding import NOTHING, Clock, Outcome, decode_rows, num_same, row_seconds
from .options import EXACT, ONE_TOKEN, CalibrationOptions, name_of, setting
from .race import ExactMode, compare_exact

CHECK_ROWS = 32  # rows decoded in exact and in one-token mode, to compare their texts
BATCH = 8  # rows decoded together, if answers do not depend on it
SPEED_ROWS = 32  # at least; four times the batch if that is more: for predicted speeds
SHORT_ANSWER = 4  # tokens, too few for several to be accepted together
MAX_CHANGES = 50
Outcomes = Sequence[Outcome]
Tasks = Sequence[TaskRow]


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
        self._tell: Progress = progress or (lambda *_: None)
        self._clock, self._tokens = Clock({}, 0.0), 0
        variant = session.variant
        # An answer then does not depend on the rows beside it, and exact mode has the one-token text.
        self.is_batch_invariant = (
            session.device == "cpu" and not variant.is_engine and variant.is_batch_invariant
        )
        self.batch = max(BATCH, options.batch) if self.is_batch_invariant else options.batch

    def plan(self, tasks: Tasks) -> None:
        """Report the drop that these rows can show, and the most time that all phases may take."""
        options, text, count = self.options, self.session.text, len(tasks)
        answers = [len(text.encode_part(t.answer)) if t.answer and text else t.max_new_tokens for t in tasks]
        prompt = sum(len(task.prompt_ids or ()) for task in tasks) / count
        tokens = max(1.0, sum(answers) / count)
        step = (1 + self.session.bundle.manifest.block) / 2
        taus = [setting(tau, metric) for metric in options.metrics for tau in options.candidates(metric)]
        rows = dict.fromkeys(map(name_of, (ONE_TOKEN, EXACT, *taus)), count)
        rows[name_of(ONE_TOKEN if self.is_batch_invariant else EXACT)] = CHECK_ROWS
        rows[race.PHASE] = 3 * race.ROUNDS * race.num_rows(count, options.batch)
        seconds = row_seconds(self.session, EXACT, self.batch, prompt, [step] * math.ceil(tokens / step))
        self._clock = Clock(rows, seconds)
        shown = bounds.upper_bound(np.zeros(count), options.level)
        can = f"{count} rows can show a drop below {shown:.2g} if no answer gets worse"
        self._tell("rows", 0, 0, f"{can}; this takes at most about {self._clock}")

    def report(self, phase: str, done: int, total: int) -> None:
        self._clock.at(phase, done, total)
        self._tell(phase, done, total, f"{self._tokens} tokens, at most {self._clock} left")

    def outcomes(self, tasks: Tasks, config: GenerationConfig, safer: Outcomes = ()) -> Outcomes:
        """The rows at a setting. What the outcomes at a safer tau show is not decoded again."""
        phase, journal = name_of(config), self.journal
        keys = [f"{phase}/{task.digest[:24]}" for task in tasks]
        begun, is_repeatable = {}, self.is_batch_invariant or self.batch == 1
        for key, task, outcome in zip(keys, tasks, safer if is_repeatable else (), strict=False):
            if key in journal or task.form:
                continue
            if not config.exact and outcome.num_shared(config) == len(outcome.steps):
                journal[key] = asdict(outcome)
            elif self.is_batch_invariant:
                begun[key] = outcome
        missing = {key: task for key, task in zip(keys, tasks, strict=True) if key not in journal}
        done, known = len(tasks) - len(missing), [begun.get(key, NOTHING) for key in missing]
        self.report(phase, done, len(tasks))
        outcomes = decode_rows(self.session, list(missing.values()), config, self.batch, known)
        for key, outcome in zip(missing, outcomes, strict=True):
            journal[key] = asdict(outcome)
            done, self._tokens = done + 1, self._tokens + len(outcome.token_ids)
            self.report(phase, done, len(tasks))
        return self.known(tasks, config)

    def known(self, tasks: Tasks, config: GenerationConfig) -> list[Outcome]:
        """The rows that were decoded at a setting."""
        kept = [self.journal[f"{name_of(config)}/{task.digest[:24]}"] for task in tasks]
        return [
            Outcome(**row | {"token_ids": tuple(row["token_ids"]), "steps": tuple(map(tuple, row["steps"]))})
            for row in kept
        ]

    def predicted_speed(self, tasks: Tasks, config: GenerationConfig) -> float:
        """Tokens per second of the first rows at the batch of the options, by the step costs of now."""
        batch, tokens, seconds = self.options.batch, 0, 0.0
        first = tasks[: max(SPEED_ROWS, 4 * batch)]
        for task, outcome in zip(first, self.known(first, config), strict=True):
            counts = [count for count, _ in outcome.steps]
            tokens += len(outcome.token_ids)
            seconds += row_seconds(self.session, config, batch, len(task.prompt_ids or ()), counts)
        return tokens / seconds


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
    short = f"half of the answers have {int(median(answers))} tokens or fewer, which tau cannot speed up"
    reasons = [f"{short}. tau stays 1"] if median(answers) <= SHORT_ANSWER else []
    metrics = () if reasons else options.metrics
    trials = [trial for m in metrics for trial in _sequence(calibrator, plan, references, qualities, m)]
    speeds = [calibrator.predicted_speed(plan.tasks, trial.measured.config) for trial in trials]
    for i, speed in enumerate(speeds):  # all by one table of step costs
        trials[i] = replace(trials[i], measured=replace(trials[i].measured, tokens_per_second=speed))
    laps = _race(calibrator, plan, trials)
    one_token, trials = _timed(laps, one_token, trials)
    choice, reason = _fastest(laps, trials)
    outcomes = calibrator.known(plan.tasks, choice.measured.config) if choice else references
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
        changed=tuple(changes_of(plan.tasks, references, outcomes)[:MAX_CHANGES]),
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
    config: GenerationConfig, outcomes: Outcomes, scores: np.ndarray, agreement: float, confidence: float
) -> Figures:
    """The figures of rows at one setting, without a speed."""
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
        0.0,
    )


def _sequence(
    calibrator: Calibrator, plan: Plan, references: Outcomes, qualities: np.ndarray, metric: str
) -> Iterator[Candidate]:
    """Test a metric's candidates from safe to fast, up to and including the first that does not pass."""
    options = calibrator.options
    outcomes: Outcomes = []
    for tau in options.candidates(metric):
        config = setting(tau, metric)
        outcomes = calibrator.outcomes(plan.tasks, config, outcomes)
        scores = _scores(plan.tasks, outcomes, references, qualities)
        drops = qualities - scores
        p_value = float(bounds.p_value(drops, options.max_drop, options.level))
        passed = p_value <= options.level if options.guarantee else drops.mean() < options.max_drop
        agreement = num_same(outcomes, references) / len(references)
        yield Candidate(
            figures(config, outcomes, scores, agreement, options.confidence),
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
    settings, batch = {name_of(config): config for config in configs}, calibrator.options.batch
    return race.race(calibrator.session, plan.tasks, settings, batch, calibrator.report)


def _timed(laps: race.Laps, one_token: Figures, trials: list[Candidate]) -> tuple[Figures, list[Candidate]]:
    """One-token mode and the trial that was raced, with their speeds in the same rounds; the predictions of
    other trials are scaled alike."""
    ratios, speeds = race.speed_ups(laps), {name: race.tokens_per_second(laps, name) for name in laps}
    raced = (trial.measured for trial in trials if trial.measured.name in laps)
    scale = next((speeds[point.name] / point.tokens_per_second for point in raced), 1.0)
    for i, trial in enumerate(trials):
        point = replace(trial.measured, tokens_per_second=scale * trial.measured.tokens_per_second)
        trials[i] = replace(trial, measured=point, speed_up=ratios.get(point.name))
    return replace(one_token, tokens_per_second=speeds[one_token.name]), trials


def _fastest(laps: race.Laps, trials: Sequence[Candidate]) -> tuple[Candidate | None, str | None]:
    """The choice among one-token mode and the taus that passed, and why."""
    if not any(trial.passed for trial in trials):
        return None, None
    name, reason = race.choose({name: rounds for name, rounds in laps.items() if name != name_of(EXACT)})
    if others := sum(t.passed and t.speed_up is None for t in trials):
        reason += f"; others that passed, but are slower by their forwards, or tie and are riskier: {others}"
    return next((t for t in trials if t.passed and t.measured.name == name), None), reason


def _references(calibrator: Calibrator, tasks: Tasks) -> tuple[Outcomes, Outcomes, Outcomes]:
    """The one-token answers of all rows, and the rows decoded in one-token and in exact mode.

    The first rows are decoded in both. If their texts are the same, one mode gives the other answers: in a
    batch-invariant bundle exact mode, which verifies the answers at the safest candidate in one step.
    """
    options, first = calibrator.options, tasks[:CHECK_ROWS]
    one_token = calibrator.outcomes(first if calibrator.is_batch_invariant else tasks, ONE_TOKEN)
    exact = calibrator.outcomes(first, EXACT)
    if num_same(one_token, exact) < len(first):
        calibrator.is_batch_invariant, calibrator.batch = False, options.batch
        one_token = calibrator.outcomes(tasks, ONE_TOKEN)
        return one_token, one_token, calibrator.outcomes(tasks, EXACT)
    if not calibrator.is_batch_invariant:
        return one_token, one_token, exact
    safest = setting(options.candidates(options.metrics[0])[0], options.metrics[0])
    return calibrator.outcomes(tasks, EXACT, calibrator.outcomes(tasks, safest)), one_token, exact


def _scores(
    tasks: Tasks, outcomes: Outcomes, references: Outcomes, qualities: np.ndarray | None = None
) -> np.ndarray:
    """Score each outcome. With the references' `qualities`, equal answers are not judged again."""
    scores = np.zeros(len(tasks)) if qualities is None else qualities.copy()
    for i, (task, outcome, reference) in enumerate(zip(tasks, outcomes, references, strict=True)):
        if qualities is None or outcome.output != reference.output:
            scores[i] = task.score(outcome.output, reference.output)
    return scores


def changes_of(tasks: Tasks, references: Outcomes, outcomes: Outcomes) -> list[Change]:
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
