"""The two plots of a calibration: the measurements, and the predictions of the record pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..calibrate import Calibration, Figures, Trial
from .drawing import COLORS, INK, QUIET, name_point, part_names, two_panels

METRIC_COLORS = dict(zip(("probability", "margin", "entropy"), COLORS, strict=False))
EXACT_MARKER = "*"
MARKERS = {"probability": "o", "margin": "s", "entropy": "D"}


def save_png(calibration: Calibration, path: Path) -> None:
    with two_panels(path) as (figure, left, right):
        _measured(left, calibration)
        _predicted(right, calibration)
        part_names(figure, left)


def _measured(axes: Any, calibration: Calibration) -> None:
    one, options = calibration.one_token, calibration.options
    axes.set_title("Measured")
    axes.set_xlabel("tokens per forward")
    axes.set_ylabel("quality (% of full score)")
    # One-token mode is a line, because as a point at 1 it would compress all others.
    _level(axes, 100 * one.quality, "one-token mode", INK)
    drop = 100 * options.max_drop
    _level(axes, 100 * one.quality - drop, f"one-token quality less {drop:g} points", QUIET)
    for metric in options.metrics:
        _line_of(axes, calibration, [t for t in calibration.tested if t.measured.metric == metric])
    if calibration.exact is not None:
        x, y = calibration.exact.tokens_per_forward, 100 * calibration.exact.quality
        axes.plot(x, y, EXACT_MARKER, color=INK, markersize=11, zorder=5)
        name_point(axes, "exact", x, y, 9, weight="bold")
    axes.margins(x=0.14, y=0.16)
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(0, bottom), min(top, 104))


def _level(axes: Any, height: float, text: str, color: str) -> None:
    axes.axhline(height, color=color, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.7)
    where = {"xycoords": ("axes fraction", "data"), "xytext": (4, -4), "textcoords": "offset points"}
    axes.annotate(text, (0, height), **where, va="top", fontsize=8, color=color)


def _line_of(axes: Any, calibration: Calibration, trials: Sequence[Trial]) -> None:
    """Draw a metric's settings in the order of their tokens per forward."""
    trials = sorted(trials, key=lambda trial: trial.measured.tokens_per_forward)
    if not trials:
        return
    points = [trial.measured for trial in trials]
    metric, is_alone = points[0].metric, len(calibration.options.metrics) == 1
    color = METRIC_COLORS[metric]
    x, y = [m.tokens_per_forward for m in points], [100 * m.quality for m in points]
    if is_alone:
        _bars(axes, points, color)
    axes.plot(x, y, "-", color=color, linewidth=1.3, alpha=0.75, label=metric)
    for trial, across, up in zip(trials, x, y, strict=True):
        face = color if trial.passed else "none"
        style = {"markersize": 6, "markeredgecolor": color, "markeredgewidth": 1.3, "zorder": 4}
        axes.plot(across, up, MARKERS[metric], markerfacecolor=face, **style)
        if trial == calibration.chosen:
            axes.plot(across, up, "o", **_ring(14), zorder=5)
            name_point(axes, f"tau {trial.measured.tau:g}", across, up, 11, weight="bold")
        elif is_alone:
            name_point(axes, f"{trial.measured.tau:g}", across, up, 7)


def _predicted(axes: Any, calibration: Calibration) -> None:
    axes.set_title("Predicted by the record pass")
    axes.set_xlabel("tokens per forward")
    axes.set_ylabel("answers unchanged (%)")
    for metric in calibration.recorded:
        curve = sorted(
            (p.tokens_per_forward, 100 * p.agreement) for p in calibration.curve if p.metric == metric
        )
        x, y = zip((1.0, 100.0), *curve, strict=True)
        axes.plot(x, y, "-", color=METRIC_COLORS[metric], linewidth=1.5, label=metric)
    for point in (trial.measured for trial in calibration.tested):
        style = {"markersize": 5, "color": METRIC_COLORS[point.metric], "markeredgecolor": INK, "zorder": 4}
        axes.plot(point.tokens_per_forward, 100 * point.agreement, MARKERS[point.metric], **style)
    if (exact := calibration.exact) is not None:
        place = exact.tokens_per_forward, 100 * exact.same / exact.num_rows
        axes.plot(
            *place, EXACT_MARKER, color=INK, markersize=11, zorder=5, linestyle="none", label="exact mode"
        )
    if calibration.tested:
        axes.plot([], [], "o", markersize=5, color="none", markeredgecolor=INK, label="real decodes")
    axes.legend(frameon=False, fontsize=8.5, loc="lower left", labelcolor=INK)
    axes.set_xlim(left=1)


def _bars(axes: Any, points: Sequence[Figures], color: str) -> None:
    """Draw the intervals of the qualities."""
    x, y = [m.tokens_per_forward for m in points], [100 * m.quality for m in points]
    below = [100 * (m.quality - m.quality_interval[0]) for m in points]
    above = [100 * (m.quality_interval[1] - m.quality) for m in points]
    axes.errorbar(x, y, yerr=[below, above], fmt="none", color=color, alpha=0.25, linewidth=1)


def _ring(size: float) -> dict[str, Any]:
    return {"color": "none", "markeredgecolor": INK, "markersize": size, "markeredgewidth": 1.4}
