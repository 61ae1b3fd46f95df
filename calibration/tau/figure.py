"""The two plots of a report: what was measured, and what the record pass predicts. Matplotlib's only home."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .calibrate import Calibration, Tested

COLORS = {"probability": "#2f7ebc", "margin": "#d1703c", "entropy": "#5f9e52"}
MARKERS = {"probability": "o", "margin": "s", "entropy": "D"}
INK, PAPER, QUIET = "#24292f", "#ffffff", "#8a8f98"
NAME = "name"  # of a point, as against other texts in a picture
CURRENT = "#010203"  # stands for the page's own text colour until the picture is written


def save_png(calibration: Calibration, path: Path) -> None:
    with _figure(calibration, INK) as figure:
        figure.savefig(path, dpi=160, facecolor=PAPER, metadata={"Software": None})


def svg(calibration: Calibration) -> str:
    """The same as inline SVG: transparent, in the text colour of the page around it, with real text."""
    with _figure(calibration, CURRENT) as figure:
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(CURRENT, "currentColor")


@contextmanager
def _figure(calibration: Calibration, ink: str) -> Iterator[Any]:
    with two_panels(ink) as (figure, left, right):
        _measured(left, calibration, ink)
        _predicted(right, calibration, ink)
        part_names(figure, left)
        yield figure


@contextmanager
def two_panels(ink: str) -> Iterator[tuple[Any, Any, Any]]:
    """(figure, left axes, right axes) in the style of all our pictures, which holds until the end of the `with`."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    style = {
        "font.family": "sans-serif", "font.sans-serif": ["Inter", "Helvetica Neue", "Arial", "DejaVu Sans"], "font.size": 9.5,
        "text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": QUIET, "xtick.color": ink, "ytick.color": ink, "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8, "svg.fonttype": "none",
        "svg.hashsalt": "mars", "axes.titlesize": 10.5, "axes.titlelocation": "left", "axes.titlepad": 12,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10, 4.1), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
        left, right = figure.subplots(1, 2)
        for axes in (left, right):
            axes.grid(True, color=QUIET, alpha=0.18, linewidth=0.7)
            axes.set_axisbelow(True)
            axes.tick_params(length=0)
        yield figure, left, right


def _measured(axes: Any, calibration: Calibration, ink: str) -> None:
    one, options = calibration.one_token, calibration.options
    axes.set_title("Measured")
    axes.set_xlabel("speed (tokens/s)")
    axes.set_ylabel("quality (% of full score)")
    floor = 100 * (one.quality - options.max_drop)
    axes.axhline(floor, color=QUIET, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.errorbar(
        one.tokens_per_second, 100 * one.quality, yerr=_error([one]), color=ink, alpha=0.25, linewidth=1
    )
    axes.plot(
        one.tokens_per_second,
        100 * one.quality,
        "o",
        color="none",
        markeredgecolor=ink,
        markersize=7,
        markeredgewidth=1.4,
        zorder=4,
    )
    name_point(axes, "one token", one.tokens_per_second, 100 * one.quality, 9)
    for metric in options.metrics:
        _line_of(
            axes, calibration, [t for t in calibration.tested if t.measured.metric == metric], metric, ink
        )
    axes.margins(x=0.14, y=0.16)
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    axes.set_xlim(max(0, left), right)
    axes.set_ylim(max(0, bottom), min(top, 104))
    axes.annotate(
        f"one-token quality less {100 * options.max_drop:g} points", (1, floor), xycoords=("axes fraction", "data"), xytext=(0, -4),
        textcoords="offset points", ha="right", va="top", fontsize=8, color=QUIET,
    )  # fmt: skip


def _line_of(axes: Any, calibration: Calibration, tested: Sequence[Tested], metric: str, ink: str) -> None:
    if not tested:
        return
    points = [t.measured for t in tested]
    is_alone = len(calibration.options.metrics) == 1
    x, y = [m.tokens_per_second for m in points], [100 * m.quality for m in points]
    color = COLORS[metric]
    if is_alone:
        axes.errorbar(x, y, yerr=_error(points), fmt="none", color=color, alpha=0.25, linewidth=1)
    axes.plot(x, y, "-", color=color, linewidth=1.3, alpha=0.75, label=metric)
    for t, across, up in zip(tested, x, y, strict=True):
        style = {"markerfacecolor": color} if t.passed else {"markerfacecolor": "none"}
        axes.plot(
            across,
            up,
            MARKERS[metric],
            markersize=6,
            markeredgecolor=color,
            markeredgewidth=1.3,
            zorder=4,
            **style,
        )
        if t is calibration.chosen:
            axes.plot(
                across,
                up,
                "o",
                markersize=14,
                color="none",
                markeredgecolor=ink,
                markeredgewidth=1.4,
                zorder=5,
            )
        if t is calibration.chosen:
            name_point(axes, f"tau {t.measured.tau:g}", across, up, 11, weight="bold")
        elif is_alone:
            name_point(axes, f"{t.measured.tau:g}", across, up, 7)


def name_point(axes: Any, text: str, x: float, y: float, above: float, weight: str = "normal") -> None:
    """Write `text` so many points above a point of the data."""
    axes.annotate(
        text,
        (x, y),
        xytext=(0, above),
        textcoords="offset points",
        ha="center",
        fontsize=8.5,
        weight=weight,
        gid=NAME,
    )


def part_names(figure: Any, axes: Any) -> None:
    """Move names that lie on each other or on another named point, upwards or below, until each can be read."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    FigureCanvasAgg(figure)  # something must measure text
    figure.draw_without_rendering()
    names = [text for text in axes.texts if text.get_gid() == NAME]
    taken = [
        Bbox.from_bounds(x - 5, y - 5, 10, 10)
        for x, y in axes.transData.transform([name.xy for name in names])
    ]
    for name in sorted(names, key=lambda name: name.xy):
        above = name.xyann[1]
        for offset in (above, -above - 9, above + 12, -above - 21, above + 24):
            name.xyann = (0, offset)
            if not any(name.get_window_extent().overlaps(box) for box in taken):
                break
        taken.append(name.get_window_extent())


def _predicted(axes: Any, calibration: Calibration, ink: str) -> None:
    axes.set_title("Predicted by the record pass")
    axes.set_xlabel("tokens per forward")
    axes.set_ylabel("answers unchanged (%)")
    ends = []
    for metric in calibration.recorded:
        curve = [p for p in calibration.curve if p.metric == metric]
        x, y = [p.tokens_per_forward for p in curve], [100 * p.agreement for p in curve]
        axes.plot([1, *x], [100, *y], "-", color=COLORS[metric], linewidth=1.5, label=metric)
        ends += [t for t in calibration.tested if t.measured.metric == metric]
    for t in ends:
        m = t.measured
        axes.plot(
            m.tokens_per_forward,
            100 * m.agreement,
            MARKERS[m.metric],
            markersize=5,
            color=COLORS[m.metric],
            markeredgecolor=ink,
            zorder=4,
        )
    if ends:
        axes.plot([], [], "o", markersize=5, color="none", markeredgecolor=ink, label="real decodes")
    axes.legend(frameon=False, fontsize=8.5, loc="lower left", labelcolor=ink)
    axes.set_xlim(left=1)


def _error(points: Sequence[Any]) -> list[list[float]]:
    """Distances of the intervals' ends from the qualities, as matplotlib wants them."""
    below = [100 * (m.quality - m.quality_interval[0]) for m in points]
    above = [100 * (m.quality_interval[1] - m.quality) for m in points]
    return [below, above]
