"""The style and common parts of the pictures, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ....runtime.errors import CalibrationError

COLORS = ("#2f7ebc", "#d1703c", "#5f9e52", "#8a62b0", "#b5912a", "#3a9a9a")
INK, PAPER, QUIET = "#24292f", "#ffffff", "#8a8f98"
NAME = "name"  # marks the name of a point among other texts in a picture
INKED = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")
STYLE = dict.fromkeys(INKED, INK) | {
    "font.family": "sans-serif", "font.sans-serif": ["Inter", "Helvetica Neue", "Arial", "DejaVu Sans"],
    "font.size": 9.5, "xtick.labelsize": 8.5, "ytick.labelsize": 8.5, "axes.edgecolor": QUIET,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8, "axes.titlesize": 10.5,
    "axes.titlelocation": "left", "axes.titlepad": 12,
}  # fmt: skip


def require_matplotlib() -> None:
    """Raise CalibrationError without matplotlib, now rather than after hours of decoding."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError as error:
        raise CalibrationError("the report needs matplotlib; pip install 'mars-export[calibrate]'") from error


@contextmanager
def two_panels(path: Path) -> Iterator[tuple[Any, Any, Any]]:
    """(figure, left axes, right axes), written to `path` as a PNG at the end of the `with`."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 4.1), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
        left, right = figure.subplots(1, 2)
        for axes in (left, right):
            axes.grid(True, color=QUIET, alpha=0.18, linewidth=0.7)
            axes.set_axisbelow(True)
            axes.tick_params(length=0)
        yield figure, left, right
        figure.savefig(path, dpi=160, facecolor=PAPER, metadata={"Software": None})


def name_point(axes: Any, text: str, x: float, y: float, above: float, weight: str = "normal") -> None:
    """Write `text` `above` points above a point of the data."""
    place = {"xytext": (0, above), "textcoords": "offset points", "ha": "center"}
    axes.annotate(text, (x, y), **place, fontsize=8.5, weight=weight, gid=NAME)


def part_names(figure: Any, axes: Any) -> None:
    """Move names that overlap each other or another named point, until each can be read."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    FigureCanvasAgg(figure)  # needed to measure text
    figure.draw_without_rendering()
    names = [text for text in axes.texts if text.get_gid() == NAME]
    points = axes.transData.transform([name.xy for name in names])
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in points]
    for name in sorted(names, key=lambda name: name.xy):
        above = name.xyann[1]
        offsets = [(0, above), (0, -above - 9), (19, -12), (-19, -12), (0, above + 12), (0, -above - 21)]
        for offset in (*offsets, (0, above + 24)):
            name.xyann = offset
            if not any(name.get_window_extent().overlaps(box) for box in taken):
                break
        taken.append(name.get_window_extent())
