"""What a calibration found, in words and tables, and the folder of its report. Draws nothing and prints nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...runtime.bundle.manifest import Profile
from ...runtime.errors import CalibrationError
from .calibrate import Calibration, Measured, Tested
from .examples import Example
from .profile import Confirmation

COLUMNS = (
    "metric",
    "tau",
    "quality, %",
    "drop",
    "below",
    "same",
    "tokens/forward",
    "predicted",
    "tokens/s",
    "verdict",
)


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a report shows. `machine` says where the speeds were measured."""

    task: str
    bundle: str
    machine: str
    calibration: Calibration
    profile: Profile
    confirmation: Confirmation | None
    examples: tuple[Example, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        chosen, options = self.calibration.chosen, self.calibration.options
        if chosen is None:
            return f"{self.task}: tau 1. No faster setting was shown to lose less than {points(options.max_drop)}."
        measured, one_token = chosen.measured, self.calibration.one_token
        speed = (
            measured.tokens_per_second / one_token.tokens_per_second if one_token.tokens_per_second else 0.0
        )
        return (
            f"{self.task}: tau {measured.tau:g} ({measured.metric}) loses less than {points(options.max_drop)} with {percent(options.confidence)}"
            f" confidence, at {measured.tokens_per_forward:.2f} tokens per forward and {speed:.2f} times the speed of one-token mode."
        )

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What the result rests on, as name and value."""
        made, profile = self.calibration, self.profile
        options = made.options
        found = [
            (
                "rows",
                f"{made.num_rows}, judged by {made.judges}"
                + (f"; {len(made.too_long)} left out, too long" if made.too_long else ""),
            ),
            ("prompts, answers", f"{_span(made.prompt_range)} and {_span(made.answer_range)} tokens"),
            (
                "bound",
                f"mean drop below {points(options.max_drop)} with {percent(options.confidence)} confidence",
            ),
            (
                "bundle",
                f"{self.bundle}, variant {profile.variant}, {profile.precision}, graph {profile.variant_sha256[:12]}",
            ),
            ("machine", f"{self.machine}, batch {options.batch}"),
            (
                "one-token check",
                f"{made.speed_rows_same} of {made.speed_rows} rows decoded without masks gave the recorded answer",
            ),
            (
                "recorded metrics",
                ", ".join(made.recorded)
                + ("" if len(made.recorded) > 1 else " (the others need a bundle exported with --metrics)"),
            ),
        ]
        if made.cut_short:
            found.append(("cut short", f"{made.cut_short} answers ended at the end of the context"))
        return [*found, *(("note", note) for note in made.notes)]

    @property
    def table(self) -> list[tuple[str, ...]]:
        """A line of COLUMNS for one-token mode and for each candidate tested."""
        return [
            _one_token_line(self.calibration.one_token),
            *(_line(t, t is self.calibration.chosen) for t in self.calibration.tested),
        ]

    @property
    def confirmed(self) -> str | None:
        """The check on other rows in one sentence."""
        if (found := self.confirmation) is None:
            return None
        before, after = found.one_token, found.chosen
        return (
            f"On {before.num_rows} rows that the choice never saw: {percent(before.quality)} at tau 1, {percent(after.quality)} at tau {after.tau:g},"
            f" a drop of {points(found.drop)} (below {points(found.drop_bound)} with {percent(self.calibration.options.confidence)} confidence),"
            f" {after.tokens_per_forward:.2f} tokens per forward, {before.tokens_per_second:.0f} and {after.tokens_per_second:.0f} tokens/s."
            + ("" if found.held else " The bound did not hold there.")
        )


def percent(value: float) -> str:
    return f"{100 * value:.1f} %".replace(".0 %", " %")


def points(value: float) -> str:
    """A difference of qualities, in percentage points."""
    text = f"{100 * value:.1f}".removesuffix(".0").replace("-", "\u2212")
    return f"{text} point" if text == "1" else f"{text} points"


def write(report: Report, folder: Path) -> list[Path]:
    """Write report.json, pareto.png and report.html into `folder`; returns them. Raises CalibrationError without matplotlib."""
    from . import figure, page

    folder.mkdir(parents=True, exist_ok=True)
    data, picture, shown = folder / "report.json", folder / "pareto.png", folder / "report.html"
    data.write_text(json.dumps(report.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    figure.save_png(report.calibration, picture)
    shown.write_text(page.render(report, figure.svg(report.calibration)), encoding="utf-8")
    return [data, picture, shown]


def require_matplotlib() -> None:
    """Raise CalibrationError now rather than after hours of decoding."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError as error:
        raise CalibrationError("the report needs matplotlib; pip install 'mars-export[calibrate]'") from error


def _one_token_line(one: Measured) -> tuple[str, ...]:
    return ("-", "1", _quality(one), "", "", "", "1.00", "", _speed(one), "one token")


def _line(tested: Tested, is_chosen: bool) -> tuple[str, ...]:
    m = tested.measured
    verdict = "chosen" if is_chosen else "passed" if tested.passed else "not shown"
    return (
        m.metric, f"{m.tau:g}", _quality(m), f"{100 * tested.drop:.1f}", f"{100 * tested.drop_bound:.1f}", percent(m.agreement),
        f"{m.tokens_per_forward:.2f}", f"{tested.predicted.tokens_per_forward:.2f}", _speed(m), verdict,
    )  # fmt: skip


def _quality(measured: Measured) -> str:
    low, high = measured.quality_interval
    return f"{100 * measured.quality:.1f} ({100 * low:.0f}–{100 * high:.0f})"


def _speed(measured: Measured) -> str:
    return (
        f"{measured.tokens_per_second:.1f}"
        if measured.tokens_per_second < 10
        else f"{measured.tokens_per_second:.0f}"
    )


def _span(ends: Sequence[int]) -> str:
    return f"{ends[0]} to {ends[1]}"
