"""The quality curve is drawn from the committed figures, and those say of exact mode what the docs say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.missing import need
from support.paths import ROOT

import quality_curve

FIGURES = ROOT / "benchmarks" / "results" / "default_checkpoint.json"
TASKS = json.loads(FIGURES.read_text(encoding="utf-8"))["tasks"]


def test_the_picture_is_drawn_from_the_committed_figures(tmp_path: Path) -> None:
    need("matplotlib", "calibrate")
    quality_curve.draw(TASKS, tmp_path / "quality.png")
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")
    assert (ROOT / "docs" / "calibration" / "quality.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", TASKS)
def test_exact_mode_has_the_score_and_the_tokens_of_one_token_mode(name: str) -> None:
    one, exact = TASKS[name]["1.0"], TASKS[name]["exact"]
    same = ("num_rows", "num_right", "tokens", "accuracy")
    assert {key: exact[key] for key in same} == {key: one[key] for key in same}
    assert exact["num_agreeing"] == exact["num_rows"]
    assert exact["tokens_per_forward"] == pytest.approx(exact["tokens"] / exact["forwards"])
    assert exact["tokens_per_forward"] > one["tokens_per_forward"]
    page = (ROOT / "docs" / "calibration.md").read_text(encoding="utf-8")
    assert f"{exact['tokens_per_forward']:.2f}" in page
