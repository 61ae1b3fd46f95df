"""The report of a calibration in words, tables and Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2

from ....runtime.bundle.manifest import Profile
from ...rounds import busy_note, percent
from ..calibrate import Calibration, Confirmation, Figures, Trial
from ..decoding import Example
from ..exact import ExactMode

COLUMNS = (
    "metric", "tau", "quality, %", "drop", "below", "same", "tokens/forward", "predicted", "tokens/s",
    "speed-up", "verdict",
)  # fmt: skip
SHOWN_CHANGES = 10
MOST_TEXT = 600  # characters of an answer on a page


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """The contents of a report. `machine` describes the machine, `load` what else was running on it."""

    task: str
    bundle: str
    machine: str
    calibration: Calibration
    profile: Profile
    confirmation: Confirmation | None
    examples: tuple[Example, ...]
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
        chosen, one_token = choice.measured, self.calibration.one_token
        ratio = chosen.tokens_per_second / one_token.tokens_per_second if one_token.tokens_per_second else 0.0
        speed = choice.speed_up.median if choice.speed_up else ratio
        return (
            f"{self.task}: tau {chosen.tau:g} ({chosen.metric}) loses less than {points(options.max_drop)}"
            f" with {percent(options.confidence)} confidence, at {chosen.tokens_per_forward:.2f} tokens per"
            f" forward and {speed:.2f} times the speed of one-token mode."
        )

    @property
    def verdict(self) -> str | None:
        """Whether the tau is worth its loss compared with exact mode, in one sentence."""
        return f"{sentence(self.calibration.exact.verdict)}." if self.calibration.exact else None

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The conditions of the result, as name and value."""
        result, profile = self.calibration, self.profile
        options = result.options
        left_out = f"; {len(result.too_long)} left out, too long" if result.too_long else ""
        others = "" if len(result.recorded) > 1 else " (the others need a bundle exported with --metrics)"
        graph, same = profile.variant_sha256[:12], f"{result.speed_rows_same} of {result.speed_rows}"
        bound = f"mean drop below {points(options.max_drop)} with {percent(options.confidence)} confidence"
        facts = [
            ("choice", result.choice),
            ("rows", f"{result.num_rows}, judged by {result.judges}{left_out}"),
            ("prompts, answers", f"{_span(result.prompt_range)} and {_span(result.answer_range)} tokens"),
            ("bound", bound),
            ("bundle", f"{self.bundle}, variant {profile.variant}, {profile.precision}, graph {graph}"),
            ("machine", f"{self.machine}, batch {options.batch}"),
            ("one-token check", f"{same} rows decoded without masks gave the recorded answer"),
            ("recorded metrics", ", ".join(result.recorded) + others),
        ]
        if result.exact is not None:
            rows = f"{result.exact.same} of {result.exact.num_rows} rows"
            facts.insert(-1, ("exact-mode check", f"{rows} decoded in exact mode gave the recorded answer"))
        if result.cut_short:
            facts.append(("cut short", f"{result.cut_short} answers ended at the end of the context"))
        facts += [("note", note) for note in (*result.notes, busy_note(self.load))]
        return [(name, value) for name, value in facts if value]

    @property
    def table(self) -> list[tuple[str, ...]]:
        """A line of COLUMNS for one-token mode, exact mode and each candidate tested."""
        one, trials = self.calibration.one_token, self.calibration.tested
        was_raced = any(trial.speed_up for trial in trials)
        first = ("-", "1", _quality(one), "", "", "", "1.00", "", _speed(one), "", "one token")
        exact = [self._exact_line(self.calibration.exact)] if self.calibration.exact else []
        return [first, *exact, *(self._line(trial, was_raced) for trial in trials)]

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
            "",
            _speed(exact),
            str(exact.speed_up),
            ("lossless" if exact.same == exact.num_rows else "rounded")
            + (", enough" if exact.suffices else ""),
        )

    def _line(self, trial: Trial, was_raced: bool) -> tuple[str, ...]:
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
            f"{trial.predicted.tokens_per_forward:.2f}",
            _speed(m) if trial.speed_up or not was_raced else "",  # other rounds would not be comparable
            str(trial.speed_up or ""),
            "chosen" if is_choice else "passed" if trial.passed else "not shown",
        )

    @property
    def confirmed(self) -> str | None:
        """The confirmation on other rows, in one sentence."""
        if (check := self.confirmation) is None:
            return None
        before, after = check.one_token, check.chosen
        below = (
            f"below {points(check.drop_bound)} with {percent(self.calibration.options.confidence)} confidence"
        )
        return (
            f"On {before.num_rows} rows that the choice never saw: {percent(before.quality)} at tau 1,"
            f" {percent(after.quality)} at tau {after.tau:g}, a drop of {points(check.drop)} ({below}),"
            f" {after.tokens_per_forward:.2f} tokens per forward, {before.tokens_per_second:.0f} and"
            f" {after.tokens_per_second:.0f} tokens/s."
            + ("" if check.held else " The bound did not hold there.")
        )

    @property
    def shown_at(self) -> str:
        """The setting of the examples."""
        tau = self.examples[0].tau if self.examples else None
        return "in exact mode" if tau is None else f"at tau {tau:g}"

    @property
    def num_changed(self) -> int:
        """The number of rows whose answer at the chosen setting differs from the one-token answer."""
        choice = self.calibration.chosen
        return round((1 - choice.measured.agreement) * self.calibration.num_rows) if choice else 0


def markdown(report: CalibrationReport, picture: str) -> str:
    """The page as Markdown; `picture` is the name of the picture's file."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    pages = jinja2.Environment(
        loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    pages.filters |= {"fenced": _fenced, "cell": _cell, "short": _short, "line": _line}
    title, _, result = report.headline.partition(": ")
    return pages.get_template("report.md.jinja").render(
        title=title,
        result=sentence(result),
        report=report,
        columns=COLUMNS,
        picture=picture,
        confidence=percent(report.calibration.options.confidence),
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
    return text if len(text) <= MOST_TEXT else text[:MOST_TEXT] + " ..."


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
