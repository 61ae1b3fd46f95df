"""The two plots of a benchmark: speed against score, and what a step costs against what it yields. Reads a report, nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mars_export.calibration.bench_report import BenchReport
from mars_export.calibration.comparison import Compared
from mars_export.calibration.figure import INK, PAPER, QUIET, name_point, two_panels

COLORS = ("#2f7ebc", "#d1703c", "#5f9e52", "#8a62b0", "#b5912a", "#3a9a9a")
MARKERS = {"cursor": "o", "block": "s"}


def save_png(report: BenchReport, path: Path) -> None:
    with two_panels(INK) as (figure, left, right):
        colors = {batch: COLORS[i % len(COLORS)] for i, batch in enumerate(dict.fromkeys(report.options.batches))}
        _pareto(left, report, colors)
        _costs(right, report, colors)
        figure.savefig(path, dpi=160, facecolor=PAPER, metadata={"Software": None})


def _pareto(axes: Any, report: BenchReport, colors: dict[int, str]) -> None:
    axes.set_title(f"Speed against score: {report.task}")
    axes.set_xlabel("tokens/s, whole answers")
    axes.set_ylabel(f"score (%), {report.judges}")
    lines: dict[tuple[int, str, str], list[Compared]] = {}
    for one in report.compared:
        setting = one.setting
        if not setting.is_baseline:
            lines.setdefault((setting.batch, setting.window_name, setting.commit_name), []).append(one)
    for one in (one for one in report.compared if one.setting.is_baseline):
        _point(axes, one, colors[one.setting.batch], "o", is_hollow=True)
        name_point(axes, "one token", one.tokens_per_second.median, 100 * one.score, 9)
    for (batch, _, commit), points in lines.items():
        base = next(one for one in report.compared if one.setting == points[0].setting.baseline)
        path = [base, *sorted(points, key=lambda one: -one.setting.tau)]
        style = "-" if commit == "cursor" else (0, (4, 2))
        axes.plot([p.tokens_per_second.median for p in path], [100 * p.score for p in path], color=colors[batch], alpha=0.5, linewidth=1.3, ls=style)
        for one in points:
            _point(axes, one, colors[batch], MARKERS[one.setting.commit.kind])
            name_point(axes, _label(report, one), one.tokens_per_second.median, 100 * one.score, 9)
    _legend(axes, report, colors)
    axes.margins(x=0.16, y=0.3)
    _room(axes, [100 * one.score for one in report.compared])
    axes.set_xlim(left=0)


def _point(axes: Any, one: Compared, color: str, marker: str, *, is_hollow: bool = False) -> None:
    """The median speed, with a bar from the slowest to the fastest round."""
    speed, score = one.tokens_per_second, 100 * one.score
    axes.plot([speed.low, speed.high], [score, score], color=color, alpha=0.3, linewidth=3, solid_capstyle="butt")
    face = PAPER if is_hollow else color
    axes.plot(speed.median, score, marker, markersize=7, markerfacecolor=face, markeredgecolor=color, markeredgewidth=1.4, zorder=4)


def _label(report: BenchReport, one: Compared) -> str:
    window = "" if len(report.options.windows) == 1 else f", w {one.setting.window_name}"
    return f"tau {one.setting.tau:g}{window}"


def _room(axes: Any, scores: list[float]) -> None:
    """At least four points of score from bottom to top, so that a difference of nothing does not look like one."""
    low, high = min(scores), max(scores)
    margin = max(2.0, 0.35 * (high - low))
    axes.set_ylim(max(-2.0, low - margin), high + margin)


def _legend(axes: Any, report: BenchReport, colors: dict[int, str]) -> None:
    if len(colors) > 1:
        for batch, color in colors.items():
            axes.plot([], [], "o", color=color, label=f"batch {batch}")
    if "block" in report.options.commits:
        axes.plot([], [], "s", color=QUIET, label=f"block commit ({report.options.cache_block})")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8.5, loc="lower right")


def _costs(axes: Any, report: BenchReport, colors: dict[int, str]) -> None:
    axes.set_title("Cost of a step, and what it yields")
    axes.set_xlabel("slots of a step")
    axes.set_ylabel("cost in one-token steps; tokens per forward")
    for curve in report.curves:
        color, base = colors[curve.batch], curve.milliseconds[0].median
        axes.fill_between(curve.slots, [p.low for p in curve.relative], [p.high for p in curve.relative], color=color, alpha=0.15, linewidth=0)
        middle = [p.median for p in curve.relative]
        axes.plot(curve.slots, middle, "-", color=color, linewidth=1.6, label=f"cost, batch {curve.batch} (1 slot: {base:.3g} ms)")
    is_alone = len(report.break_evens) == 1
    for batch, window, k in report.break_evens:
        if k is None:
            continue
        slots = k + window - 1
        axes.plot([1, slots], [k, k], color=colors[batch], linewidth=0.9, linestyle=(0, (4, 3)))
        if is_alone:
            text = f"below {k:.2f} tokens per forward nothing is gained"
            axes.annotate(text, (1, k), xytext=(2, 4), textcoords="offset points", fontsize=8, color=QUIET)
    for one in report.compared:
        size = report.window_size(one.setting)
        if size is not None:
            k = one.tokens_per_forward
            axes.plot(k + size - 1, k, "o", markersize=7, color=colors[one.setting.batch], zorder=4)
            if one.setting.batch == report.options.batches[0]:
                name_point(axes, f"{_label(report, one)}: {k:.2f}", k + size - 1, k, 9)
    axes.legend(frameon=False, fontsize=8.5, loc="upper left")
    axes.margins(x=0.08)
    low, high = 0.0, axes.get_ylim()[1]
    axes.set_ylim(low, high * 1.25)
