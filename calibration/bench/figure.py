"""The plots of a benchmark: speed against score, and a step's cost against its yield."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from ...runtime.decode.config import Window
from ..drawing import COLORS, PAPER, QUIET, name_point, two_panels
from .compare import Comparison
from .report import BenchReport
from .settings import Setting

MARKERS = {"cursor": "o", "block": "s"}
EXACT_MARKER = "*"  # not on a line, because exact mode has no tau to vary
Series = tuple[int, Window, str]
"""Batch, window and commit: settings that differ only in tau, which a line connects."""
Colors = Mapping[tuple[int, Window], str]
"""By batch and window; the marker shows the commit."""


def save_png(report: BenchReport, path: Path) -> None:
    options = report.options
    pairs = dict.fromkeys((s.batch, s.window) for s in options.settings if not s.is_baseline)
    alone = [batch for batch in options.batches if not any(batch == b for b, _ in pairs)]
    pairs |= dict.fromkeys((batch, Setting(batch).window) for batch in alone)
    colors = dict(zip(pairs, cycle(COLORS), strict=False))
    with two_panels(path) as (_, left, right):
        _pareto(left, report, colors)
        _costs(right, report, colors)


def _series(one: Comparison) -> Series:
    return one.setting.batch, one.setting.window, one.setting.commit_name


def _color(setting: Setting, colors: Colors) -> str:
    """The colour of a setting. One-token mode has no window: it has the first colour of its batch."""
    color = colors.get((setting.batch, setting.window))
    return color or next(color for (batch, _), color in colors.items() if batch == setting.batch)


def _fastest(some: Sequence[Comparison]) -> list[Comparison]:
    """The series with the fastest setting, from slow to fast, which gets labels."""
    if not some:
        return []
    best = _series(max(some, key=lambda one: one.tokens_per_second.median))
    return [one for one in sorted(some, key=lambda one: one.tokens_per_second.median) if _series(one) == best]


def _pareto(axes: Any, report: BenchReport, colors: Colors) -> None:
    axes.set_title(f"Speed against score: {report.task}")
    axes.set_xlabel("tokens/s, whole answers")
    axes.set_ylabel(f"score (%), {report.judges}")
    plain = [one for one in report.compared if one.setting.is_baseline]
    exact = [one for one in report.compared if one.setting.is_exact]
    others = [one for one in report.compared if not (one.setting.is_baseline or one.setting.is_exact)]
    for one in report.compared:
        _point(axes, one, _color(one.setting, colors))
    for series in dict.fromkeys(map(_series, others)):
        points = [one for one in others if _series(one) == series]
        base = next(one for one in plain if one.setting == points[0].setting.baseline)
        path = [base, *sorted(points, key=lambda one: -(one.setting.tau or 0.0))]
        style = "-" if points[0].setting.commit.kind == "cursor" else (0, (4, 2))
        color = _color(points[0].setting, colors)
        x, y = zip(*map(_place, path), strict=True)
        axes.plot(x, y, color=color, alpha=0.5, linewidth=1.3, linestyle=style)
    name_point(axes, "one token", *_place(plain[0]), 9)
    if exact:
        name_point(axes, "exact", *_place(max(exact, key=lambda one: one.tokens_per_second.median)), -17)
    for i, one in enumerate(_fastest(others)):  # alternately above and below: neighbours are often close
        offset, side = ((6, -5), "top") if i % 2 else ((6, 5), "bottom")
        _note(axes, one.setting.mode, _place(one), offset, ha="left", va=side)
    _legend(axes, report, colors)
    axes.margins(x=0.2)
    axes.set_xlim(left=0)
    _scores(axes, [100 * one.score for one in report.compared])


def _place(one: Comparison) -> tuple[float, float]:
    return one.tokens_per_second.median, 100 * one.score


def _point(axes: Any, one: Comparison, color: str) -> None:
    """The median speed, a bar from the slowest to the fastest round, and a bar for the score's interval."""
    speed, score = one.tokens_per_second, 100 * one.score
    axes.plot(
        [speed.low, speed.high], [score] * 2, color=color, alpha=0.3, linewidth=3, solid_capstyle="butt"
    )
    axes.plot(
        [speed.median] * 2, [100 * end for end in one.score_interval], color=color, alpha=0.2, linewidth=1
    )
    size = 12 if one.setting.is_exact else 7
    style = {"markersize": size, "markeredgecolor": color, "markeredgewidth": 1.4, "zorder": 4}
    face = PAPER if one.setting.is_baseline else color
    marker = EXACT_MARKER if one.setting.is_exact else MARKERS[one.setting.commit.kind]
    axes.plot(speed.median, score, marker, markerfacecolor=face, **style)


def _note(
    axes: Any, text: str, place: tuple[float, float], offset: tuple[float, float], **style: Any
) -> None:
    axes.annotate(text, place, xytext=offset, textcoords="offset points", fontsize=8.5, **style)


def _scores(axes: Any, scores: list[float]) -> None:
    """Show at least several points from bottom to top, so that a tiny difference does not look large."""
    low, high = min(scores), max(scores)
    margin = max(3.0, 0.3 * (high - low))
    axes.set_ylim(low - margin, min(high + margin, 101.5))
    step = next((step for step in (1, 2, 5, 10, 20) if high - low + 2 * margin <= 8 * step), 25)
    axes.set_yticks([tick for tick in range(0, 101, step) if low - margin <= tick])


def _legend(axes: Any, report: BenchReport, colors: Colors) -> None:
    has_windows = len(report.options.windows) > 1
    if len(colors) > 1:
        axes.plot([], [], "o", color="none", markeredgecolor=QUIET, markeredgewidth=1.4, label="one token")
        if report.options.exact:
            axes.plot([], [], EXACT_MARKER, color=QUIET, markersize=10, linestyle="none", label="exact")
        for (batch, window), color in colors.items():
            label = f"batch {batch}" + (f", window {window}" if has_windows else "")
            axes.plot([], [], "o", color=color, label=label)
    if "block" in report.options.commits:
        label = f"block commit ({report.options.cache_block})"
        axes.plot([], [], MARKERS["block"], color=QUIET, label=label)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8.5, loc="best")


def _costs(axes: Any, report: BenchReport, colors: Colors) -> None:
    axes.set_xlabel("slots of a step")
    axes.set_ylabel("steps of one slot; tokens per forward")
    costs = {curve.batch: curve for curve in report.curves}
    for batch, curve in costs.items():
        color, base = _color(Setting(batch), colors), curve.milliseconds[0].median
        low, high = [p.low for p in curve.relative], [p.high for p in curve.relative]
        axes.fill_between(curve.slots, low, high, color=color, alpha=0.15, linewidth=0)
        label = f"cost, batch {batch} (one slot: {base:.3g} ms)"
        middle = [p.median for p in curve.relative]
        axes.plot(curve.slots, middle, "-", color=color, linewidth=1.6, label=label)
    _break_evens(axes, report, colors)
    # A variable window has no fixed number of slots, so it has no dot.
    yields = [one for one in report.compared if report.window_size(one.setting) is not None]
    axes.set_title("Cost of a step (lines), and what it yields (dots)" if yields else "Cost of a step")
    for one in yields:
        slots, k = _slots(report, one), one.tokens_per_forward
        color = _color(one.setting, colors)
        height = costs[one.setting.batch].cost(slots)
        axes.plot([slots, slots], [height, k], color=color, alpha=0.35, linewidth=1)
        axes.plot(slots, k, "o", markersize=7, color=color, zorder=4)
    top = max([axes.get_ylim()[1], *(one.tokens_per_forward for one in yields)])
    named = _fastest(yields)
    for one, height in zip(named, _apart([one.tokens_per_forward for one in named], 0.06 * top), strict=True):
        text = f"{one.setting.mode}: {one.tokens_per_forward:.2f}"
        _note(axes, text, (_slots(report, one), height), (-8, 0), ha="right", va="center")
    axes.legend(frameon=False, fontsize=8.5, loc="upper left")
    axes.set_xticks(report.curves[0].slots)
    axes.set_xlim(0.4, report.curves[0].slots[-1] + 0.6)
    axes.set_ylim(0, top * (1.1 + 0.05 * len(costs)))


def _slots(report: BenchReport, one: Comparison) -> float:
    """The slots of a typical step: the last step's tokens, and the masks of a full window."""
    return one.tokens_per_forward + (report.window_size(one.setting) or 1) - 1


def _break_evens(axes: Any, report: BenchReport, colors: Colors) -> None:
    """A line from the axis to the point where a step costs as much as it yields."""
    known = [(batch, window, k) for batch, window, k in report.break_evens if k is not None]
    for batch, window, k in known:
        slots, color = k + window - 1, _color(Setting(batch), colors)
        axes.plot([0.4, slots], [k, k], color=color, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.plot(slots, k, "x", color=color, markersize=6, markeredgewidth=1.5, zorder=4)
    if len(known) == 1:
        k = known[0][2]
        _note(axes, f"below {k:.2f} tokens per forward nothing is gained", (0.4, k), (5, 6), color=QUIET)


def _apart(values: Sequence[float], least: float) -> list[float]:
    """The values, each moved up until it is `least` above the one below it."""
    placed = list(values)
    below = -least
    for i in sorted(range(len(values)), key=values.__getitem__):
        placed[i] = below = max(values[i], below + least)
    return placed
