"""Draws quality against tokens per forward, exact mode and tau, from the committed figures.

    python benchmarks/quality_curve.py [--figures benchmarks/results/default_checkpoint.json]
                                       [--picture docs/calibration/quality.png]

Left: right answers; right: answers unchanged from one token a step. That mode is a line, because as a point
at 1 it would compress all others. Points of all rows are connected, those of fewer rows are small. Tasks
without right answers are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mars_export.calibration.drawing import COLORS, INK, QUIET, name_point, part_names, two_panels

ROOT = Path(__file__).resolve().parent.parent
ONE_TOKEN, EXACT = "1.0", "exact"
DASHES = (0, (4, 3))
Points = Mapping[str, Mapping[str, Any]]


def draw(tasks: Mapping[str, Points], picture: Path) -> None:
    """`tasks`: for each the points by tau, as examples/default-checkpoint/evaluate.py writes them."""
    judged = {name: points for name, points in tasks.items() if name != "chat"}
    with two_panels(picture) as (figure, *panels):
        titles = {"accuracy": "Right answers", "agreement": "Answers unchanged from one token a step"}
        for axes, (field, title) in zip(panels, titles.items(), strict=True):
            for color, (name, points) in zip(COLORS, judged.items(), strict=False):
                curve(axes, name, points, field, color)
            axes.set_title(title)
            axes.set_xlabel("tokens per forward")
            axes.set_ylabel("%")
            axes.margins(x=0.1, y=0.14)
        legend = panels[1]
        legend.plot([], [], "*", color="none", markeredgecolor=INK, markersize=11, label="exact mode")
        legend.plot([], [], "o", color=QUIET, label="tau")
        legend.plot([], [], color=QUIET, linewidth=0.9, linestyle=DASHES, label="one token")
        legend.legend(frameon=False, fontsize=8.5, loc="lower left")
        for axes in panels:
            part_names(figure, axes)


def curve(axes: Any, name: str, points: Points, field: str, color: str) -> None:
    """One task: its taus joined from safe to fast, exact mode as a star, one token as a level."""
    most = max(point["num_rows"] for point in points.values())
    taus = sorted((key for key in points if key not in (EXACT, ONE_TOKEN)), key=float, reverse=True)
    place = {key: (point["tokens_per_forward"], 100 * point[field]) for key, point in points.items()}
    level = place[ONE_TOKEN][1]
    axes.axhline(level, color=color if field == "accuracy" else QUIET, linewidth=0.9, linestyle=DASHES)
    for all_rows, size, width in ((True, 6.0, 1.5), (False, 3.5, 0.0)):
        some = [key for key in taus if (points[key]["num_rows"] == most) == all_rows]
        x, y = [place[key][0] for key in some], [place[key][1] for key in some]
        label = {"label": name} if all_rows else {}
        axes.plot(x, y, "o-", color=color, markersize=size, linewidth=width, alpha=0.75, **label)
        for key in some:
            name_point(axes, key, *place[key], -13.5)
    if EXACT in points:
        axes.plot(*place[EXACT], "*", color=color, markeredgecolor=INK, markersize=14, zorder=5)
        name_point(axes, "exact", *place[EXACT], 9, weight="bold")


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    results = ROOT / "benchmarks" / "results" / "default_checkpoint.json"
    parser.add_argument("--figures", type=Path, default=results)
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "calibration" / "quality.png")
    args = parser.parse_args()
    draw(json.loads(args.figures.read_text(encoding="utf-8"))["tasks"], args.picture)


if __name__ == "__main__":
    main()
