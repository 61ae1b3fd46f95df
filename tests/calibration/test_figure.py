"""The picture of a calibration, and what its report says of the machine, on a report of docs/."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from support.missing import need
from support.paths import ROOT

from mars_export.calibration.journal import restore
from mars_export.calibration.tau.report import figure
from mars_export.calibration.tau.report.report import CalibrationReport, markdown

need("matplotlib", "calibrate")

FIGURES = json.loads((ROOT / "docs/calibration/assistant/report.json").read_text(encoding="utf-8"))


@pytest.fixture
def report() -> CalibrationReport:
    return restore(CalibrationReport, FIGURES)  # type: ignore[no-any-return]


@pytest.mark.parametrize("panel", [figure._measured, figure._predicted])
def test_no_line_goes_back(report: CalibrationReport, panel: Callable[[Any, Any], None]) -> None:
    """Settings are tested from safe to fast, and a faster one may give fewer tokens per forward."""
    from matplotlib.figure import Figure

    made = report.calibration
    jumbled = replace(made, tested=made.tested[::-1], curve=made.curve[::-1])
    axes = Figure().subplots()
    panel(axes, jumbled)
    lines = [line.get_xdata() for line in axes.lines if line.get_label() == "probability"]
    assert lines and all(len(x) >= len(made.tested) for x in lines)
    assert all(a <= b for x in lines for a, b in pairwise(x))


def test_a_busy_machine_is_said_in_the_report(report: CalibrationReport) -> None:
    quiet, busy = replace(report, load=0.0), replace(report, load=1e6)
    [note] = set(busy.facts) - set(quiet.facts)
    assert note[0] == "note" and "the machine was busy" in note[1]
    assert note[1] in markdown(busy, "pareto.png") and note[1] not in markdown(quiet, "pareto.png")
