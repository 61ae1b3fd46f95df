"""The quality curve is drawn from the committed figures, and those say of exact mode what the docs say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.missing import need
from support.paths import ROOT

import exact
import quality_curve

FIGURES = ROOT / "benchmarks" / "results" / "default_checkpoint.json"
TASKS = json.loads(FIGURES.read_text(encoding="utf-8"))["tasks"]


def test_the_picture_is_drawn_from_the_committed_figures(tmp_path: Path) -> None:
    need("matplotlib", "calibrate")
    quality_curve.draw(TASKS, tmp_path / "quality.png")
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")
    assert (ROOT / "docs" / "calibration" / "quality.png").read_bytes().startswith(b"\x89PNG")


def test_points_of_exact_mode_are_put_behind_one_token() -> None:
    points = {key: point for key, point in TASKS["chat"].items() if key != "exact"}
    of_one = {"same": 105, "tokens": points["1.0"]["tokens"], "forwards": 2000, "proposed": 9, "verified": 5}
    made = exact.with_exact(points, of_one)
    assert list(made) == ["1.0", "exact", *list(points)[1:]]
    assert made["exact"].keys() == TASKS["chat"]["exact"].keys()
    assert made["exact"]["tokens_per_forward"] == points["1.0"]["tokens"] / 2000
    assert exact.with_exact(made, of_one) == made, "again: in its place"
    with pytest.raises(SystemExit, match="not all texts"):
        exact.with_exact(points, of_one | {"same": 104})


@pytest.mark.parametrize("name", TASKS)
def test_exact_mode_has_the_score_and_the_tokens_of_one_token_mode(name: str) -> None:
    one, found = TASKS[name]["1.0"], TASKS[name]["exact"]
    same = ("num_rows", "num_right", "tokens", "accuracy")
    assert {key: found[key] for key in same} == {key: one[key] for key in same}
    assert found["num_agreeing"] == found["num_rows"]
    assert found["tokens_per_forward"] == pytest.approx(found["tokens"] / found["forwards"])
    assert found["tokens_per_forward"] > one["tokens_per_forward"]
    page = (ROOT / "docs" / "calibration.md").read_text(encoding="utf-8")
    assert f"{found['tokens_per_forward']:.2f}" in page
