"""The report of a calibration in words, tables and Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2

from ...runtime.bundle.manifest import Profile
from ..rounds import busy_note, percent
from .calibrate import Calibration, Candidate, Figures
from .race import ExactMode

COLUMNS = (
    "metric", "tau", "quality, %", "drop", "below", "same", "tokens/forward", "tokens/s", "speed-up",
    "verdict",
)  # fmt: skip
SHOWN_CHANGES = 10
MAX_TEXT = 600  # characters of an answer on a page


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """The contents of a report.

    graph: the calibrated variant
    machine: the machine
    profile: of the chosen tau; None if tau stays 1
    load: load average before the calibration; None if it is unknown
    """

    task: str
    bundle: str
    machine: str
    calibration: Calibration
    graph: str
    profile: Profile | None
    load: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        choice, options = self.calibration.chosen, self.calibration.options
        if choice is None:
            if any(trial.passed for trial in self.calibration.tested):
                return f"{self.task}: tau 1. No setting that passed was shown to be faster here."
            drop = points(options.max_drop)
            return f"{self.task}: tau 1. No faster tau was shown to lose less than {drop}."
        chosen, speed = choice.measured, choice.speed_up.median if choice.speed_up else 0.0
        sure = f"with {percent(options.confidence)} confidence" if options.guarantee else "on these rows"
        return (
            f"{self.task}: tau {chosen.tau:g} ({chosen.metric}) loses less than {points(options.max_drop)}"
            f" {sure}, at {chosen.tokens_per_forward:.2f} tokens per"
            f" forward and {speed:.2f} times the speed of one-token mode."
        )

    @property
    def verdict(self) -> str:
        """Whether the tau is worth its loss compared with exact mode, in one sentence."""
        return f"{sentence(self.calibration.exact.verdict)}."

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The conditions of the result, as name and value."""
        result, options = self.calibration, self.calibration.options
        left_out = f"; {len(result.too_long)} left out, too long" if result.too_long else ""
        same = f"{result.exact.same} of {result.exact.num_rows} rows"
        bound = f"mean drop below {points(options.max_drop)} with {percent(options.confidence)} confidence"
        if not options.guarantee:
            bound = f"mean drop of these rows below {points(options.max_drop)}, without a guarantee"
        facts = [
            ("choice", result.choice),
            ("rows", f"{result.num_rows}, judged by {result.judges}{left_out}"),
            ("prompts, answers", f"{_span(result.prompt_range)} and {_span(result.answer_range)} tokens"),
            ("bound", bound),
            ("bundle", f"{self.bundle}, {self.graph}"),
            ("machine", f"{self.machine}, batch {options.batch}"),
            ("exact-mode check", f"{same} decoded in exact mode gave the one-token answer"),
        ]
        if result.cut_short:
            facts.append(("cut short", f"{result.cut_short} answers ended at the end of the context"))
        facts += [("note", note) for note in (*result.notes, busy_note(self.load))]
        return [(name, value) for name, value in facts if value]

    @property
    def table(self) -> list[tuple[str, ...]]:
        """A line of COLUMNS for one-token mode, exact mode and each candidate tested."""
        one, trials = self.calibration.one_token, self.calibration.tested
        first = ("-", "1", _quality(one), "", "", "", "1.00", _speed(one), "", "one token")
        exact = self._exact_line(self.calibration.exact)
        return [first, exact, *map(self._line, trials)]

    def _exact_line(self, exact: ExactMode) -> tuple[str, ...]:
        """Exact mode's line. If its texts are those of one-token mode, so is its quality."""
        return (
            "-",
            "exact",
            _quality(exact),
            f"{100 * exact.drop:.1f}",
            f"{100 * exact.drop_bound:.1f}",
            percent(exact.same / exact.num_rows),
            f"{exact.tokens_per_forward:.2f}",
            _speed(exact),
            str(exact.speed_up),
            ("lossless" if exact.same == exact.num_rows else "rounded")
            + (", enough" if exact.suffices else ""),
        )

    def _line(self, trial: Candidate) -> tuple[str, ...]:
        m = trial.measured
        is_choice = trial == self.calibration.chosen
        return (
            m.metric,
            f"{m.tau:g}",
            _quality(m),
            f"{100 * trial.drop:.1f}",
            f"{100 * trial.drop_bound:.1f}",
            percent(m.agreement),
            f"{m.tokens_per_forward:.2f}",
            _speed(m) if trial.speed_up else f"~{_speed(m)}",  # predicted
            str(trial.speed_up or ""),
            "chosen" if is_choice else "passed" if trial.passed else "not shown",
        )

    @property
    def num_changed(self) -> int:
        """The number of rows whose answer at the chosen setting differs from the one-token answer."""
        choice = self.calibration.chosen
        return round((1 - choice.measured.agreement) * self.calibration.num_rows) if choice else 0


def markdown(report: CalibrationReport) -> str:
    """The page as Markdown."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    pages = jinja2.Environment(
        loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    pages.filters |= {"fenced": _fenced, "cell": _cell, "short": _short, "line": _line, "sentence": sentence}
    title, _, result = report.headline.partition(": ")
    return pages.get_template("report.md.jinja").render(
        title=title,
        result=sentence(result),
        report=report,
        columns=COLUMNS,
        changes=report.calibration.changed[:SHOWN_CHANGES],
    )


def _fenced(text: str) -> str:
    """The text as a Markdown block, with a fence longer than its backticks."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _cell(text: str) -> str:
    """Text in a Markdown table."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", text)


def _line(text: str) -> str:
    """Text on one line of a Markdown paragraph."""
    return _cell(" ".join(_short(text).split()))


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " ..."


def sentence(text: str) -> str:
    """With a capital."""
    return text[:1].upper() + text[1:]


def points(value: float) -> str:
    """A difference of qualities, in percentage points."""
    text = f"{100 * value:.1f}".removesuffix(".0").replace("-", "\u2212")
    return f"{text} point" if text == "1" else f"{text} points"


def _quality(point: Figures | ExactMode) -> str:
    low, high = point.quality_interval
    return f"{100 * point.quality:.1f} ({100 * low:.0f}–{100 * high:.0f})"


def _speed(point: Figures | ExactMode) -> str:
    speed = point.tokens_per_second
    return f"{speed:.1f}" if speed < 10 else f"{speed:.0f}"


def _span(ends: Sequence[int]) -> str:
    return f"{ends[0]} to {ends[1]}"
