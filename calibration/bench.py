"""The command `bench`: measures all settings in interleaved rounds, compares them, and reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from math import sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

from ..runtime import machine
from ..runtime.session.session import Session
from .laps import Timeline, serve
from .options import BenchOptions, Setting
from .rounds import Lap, Percentiles, Progress, Rounds, busy_note, percent, speed_up, timed
from .rows import TaskRequest, make_plan
from .tasks.tasks import TaskRow

CONFIDENCE = 0.95  # of the interval of a score


@dataclass(frozen=True, slots=True)
class Comparison:
    """The figures of one setting. Times are in seconds."""

    setting: Setting
    tokens_per_second: Rounds  # of everything, including prompts
    speed_up: Rounds  # over one-token mode at the same batch, in the same round
    tokens_per_forward: float
    ttft: Percentiles | None  # over all answers of all rounds, like the next two
    itl: Percentiles | None  # over events with tokens
    tpot: Percentiles | None
    score: float  # 0 to 1, of the first round
    score_interval: tuple[float, float]  # of the score's mean for any number of rows
    same_answers: float  # share of answers that are those of one-token mode
    # share of exact mode's draft tokens that were verified; None without draft tokens
    draft_acceptance_rate: float | None
    requests_per_second: Rounds  # with `batch` requests at any time
    answer_p95: float | None  # 95 of 100 of them had their whole answer within this time
    answers: int
    tokens: int
    unsteady: int  # answers that differ between rounds
    cut_short: int  # answers that ended because the context was full
    forced: float = 0.0  # share of tokens that the rows' grammars forced, which no rule accepted


def compare(tasks: Sequence[TaskRow], laps: Mapping[Setting, Sequence[Lap]]) -> Iterator[Comparison]:
    """A Comparison for each setting. `laps` must also hold one-token mode at the same batch."""
    for setting, rounds in laps.items():
        baseline = laps[Setting(setting.batch)]
        by_round: list[tuple[Timeline, ...]] = [lap.answers for lap in rounds]
        first, every = by_round[0], [answer for answers in by_round for answer in answers]
        pairs = [(a.output, p.output) for a, p in zip(first, baseline[0].answers, strict=True)]
        scores = [task.score(a, p) for task, (a, p) in zip(tasks, pairs, strict=True)]
        tokens, forwards = sum(a.num_tokens for a in every), sum(lap.forwards for lap in rounds)
        draft_tokens = sum(a.stats.draft_tokens for a in every)
        durations = [a.seconds for a in every if a.seconds is not None]
        yield Comparison(
            setting=setting,
            tokens_per_second=Rounds.of([lap.speed for lap in rounds]),
            speed_up=speed_up(rounds, baseline),
            tokens_per_forward=tokens / forwards if forwards else 0.0,
            ttft=Percentiles.of([a.ttft for a in every if a.ttft is not None]),
            itl=Percentiles.of([gap for a in every for gap in a.gaps]),
            tpot=Percentiles.of([a.tpot for a in every if a.tpot is not None]),
            score=sum(scores) / len(scores),
            score_interval=wilson(sum(scores), len(scores)),
            same_answers=sum(a.token_ids == p.token_ids for a, p in pairs) / len(pairs),
            draft_acceptance_rate=sum(a.stats.accepted_draft_tokens for a in every) / draft_tokens
            if draft_tokens
            else None,
            requests_per_second=Rounds.of([len(first) / lap.seconds for lap in rounds]),
            answer_p95=float(np.percentile(durations, 95)) if durations else None,
            answers=len(first),
            tokens=sum(a.num_tokens for a in first),
            unsteady=sum(len({a.output.token_ids for a in row}) > 1 for row in zip(*by_round, strict=True)),
            cut_short=sum(a.finish_reason == "capacity" for a in first),
            forced=sum(a.stats.forced for a in every) / max(1, tokens),
        )


def wilson(right: float, count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's interval for `right` of `count` rows; it is wide for partial scores."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, weight = right / count, 1 + z * z / count
    middle = (share + z * z / (2 * count)) / weight
    half = z / weight * sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


SCHEMA = 4


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The figures of a report. `machine` describes the machine, `load` what else was running on it."""

    task: str
    bundle: str
    variant: str
    precision: str
    block: int
    machine: str
    load: float | None
    date: str
    options: BenchOptions
    num_rows: int
    judges: str
    too_long: tuple[int, ...]
    prompt_tokens: tuple[int, int]
    compared: tuple[Comparison, ...]

    def to_dict(self) -> dict[str, Any]:
        """The output of `bench --json` (docs/bench.md)."""
        return {"schema": SCHEMA, **asdict(self), "notes": self.notes}

    @property
    def headline(self) -> str:
        """The fastest setting in one sentence."""
        best = max(self.compared, key=lambda line: line.speed_up.median)
        if best.setting.one_token:
            return f"{self.task}: no setting was faster than one-token mode."
        plain = next(line for line in self.compared if line.setting == Setting(best.setting.batch))
        return (
            f"{self.task}, batch {best.setting.batch}: {best.setting.mode} is {best.speed_up.median:.2f}"
            f" times as fast as one-token mode ({_speed(best)} against {_speed(plain)} tokens/s), score"
            f" {_score(best)} against {_score(plain)} %.{self._exact_beside(best)}"
        )

    def _exact_beside(self, best: Comparison) -> str:
        """The fastest setting in exact mode at the batch of `best`, if that has a tau."""
        exact = [o for o in self.compared if o.setting.tau is None and o.setting.batch == best.setting.batch]
        if best.setting.tau is None or not exact:
            return ""
        one = max(exact, key=lambda line: line.speed_up.median)
        return f" Exact mode, which gives the one-token text: {one.speed_up.median:.2f} times."

    @property
    def facts(self) -> list[str]:
        """The conditions of the figures, and what they mean, in sentences."""
        rounds = f"{self.options.rounds} round{'s' if self.options.rounds > 1 else ''}"
        low, high = self.prompt_tokens
        return [
            f"{self.num_rows} rows, {rounds}, judged by {self.judges}; prompts of {low} to {high} tokens",
            f"{self.bundle}, variant {self.variant}, {self.precision}, block {self.block}; {self.machine}",
            *(f"note: {note}" for note in self.notes),
        ]

    @property
    def notes(self) -> list[str]:
        """Warnings for readers of the figures."""
        notes = [note] if (note := busy_note(self.load)) else []
        if self.too_long:
            notes.append(
                f"{len(self.too_long)} rows were left out, their prompts are longer than the context"
            )
        if cut := max(line.cut_short for line in self.compared):
            notes.append(f"up to {cut} answers of a setting ended because the context was full")
        if unsteady := max(line.unsteady for line in self.compared):
            notes.append(f"up to {unsteady} answers of a setting differed between rounds")
        if forced := max(line.forced for line in self.compared):
            notes.append(
                f"grammars gave up to {percent(forced)} of a setting's tokens: these count in tok/fwd, and no"
                " rule accepted them"
            )
        largest = max(self.options.batches)
        if self.num_rows < 2 * largest:
            short = f"{self.num_rows} rows keep a batch of {largest} full only for a short time"
            notes.append(f"{short}; use more with --limit")
        return notes

    # --- tables: column names, then a line of cells each ---

    @property
    def speed_table(self) -> list[tuple[str, ...]]:
        head = ("tokens/s", "speed-up", "tok/fwd", "score, %")
        lines = [
            (_speed(line), str(line.speed_up), f"{line.tokens_per_forward:.2f}", _score(line))
            for line in self.compared
        ]
        return self._table(head, lines)

    @property
    def latency_table(self) -> list[tuple[str, ...]]:
        """Milliseconds."""
        head = ("TTFT", "p99", "ITL", "p99", "TPOT", "p99")
        lines = [(*_times(line.ttft), *_times(line.itl), *_times(line.tpot)) for line in self.compared]
        return self._table(head, lines)

    @property
    def load_table(self) -> list[tuple[str, ...]]:
        """Requests a second of a batch that is always full, and the time to the whole answer in seconds."""
        lines = [
            (
                f"{line.requests_per_second.median:.2f}",
                "-" if line.answer_p95 is None else f"{line.answer_p95:.2f}",
            )
            for line in self.compared
        ]
        return self._table(("requests/s", "answer p95, s"), lines)

    def _table(self, head: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """A head and lines, each after the batch and tau of its setting, and the masks if they is given."""
        named = self.options.masks != ("auto",)
        names = [_names(line.setting) for line in self.compared]
        table = [(("batch", "tau", "masks"), head), *zip(names, lines, strict=True)]
        return [(*(name if named else name[:2]), *cells) for name, cells in table]


def _names(setting: Setting) -> tuple[str, str, str]:
    masks = "-" if setting.one_token else str(setting.masks)
    return str(setting.batch), setting.mode.removeprefix("tau "), masks


def _speed(line: Comparison) -> str:
    return _short(line.tokens_per_second.median)


def _score(line: Comparison) -> str:
    """A score with its interval."""
    low, high = line.score_interval
    return f"{percent(line.score)[:-2]} ({100 * low:.0f}-{100 * high:.0f})"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _times(value: Percentiles | None) -> tuple[str, str]:
    return ("-", "-") if value is None else (_short(1000 * value.p50), _short(1000 * value.p99))


PHASE = "answers"  # of the progress


@dataclass(frozen=True, slots=True)
class BenchRequest(TaskRequest):
    """A request of `mars-export bench`."""

    options: BenchOptions = field(default_factory=BenchOptions)


def bench(request: BenchRequest, progress: Progress | None = None) -> BenchReport:
    """Measure all settings.

    Raises CalibrationError for an unsuitable task or option, before anything is measured.
    """
    busy, tasks, session, options = machine.load(), request.rows(), request.open(), request.options
    for setting in options.settings:
        session.check(setting.config(1))
    plan = make_plan(session, tasks, options.limit or options.slice_rows)
    return BenchReport(
        task=request.task_name,
        bundle=request.bundle.name,
        variant=session.variant.name,
        precision=session.variant.precision,
        block=session.bundle.manifest.block,
        machine=request.machine,
        load=busy,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        options=options,
        num_rows=len(plan.tasks),
        judges=plan.judges,
        too_long=plan.too_long,
        prompt_tokens=plan.prompt_range,
        compared=tuple(compare(plan.tasks, measure(session, plan.tasks, options, progress))),
    )


def measure(
    session: Session, tasks: Sequence[TaskRow], options: BenchOptions, progress: Progress | None = None
) -> dict[Setting, list[Lap]]:
    """Each setting's laps by round."""
    return timed(
        {setting: setting.batch for setting in options.settings},
        tasks,
        options.rounds,
        lambda setting, _, rows: serve(session, rows, setting),
        lambda done, total: progress(PHASE, done, total) if progress else None,
        slice_rows=options.slice_rows,
    )
