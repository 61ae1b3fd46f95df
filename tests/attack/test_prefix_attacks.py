"""The short form of benchmarks/attack/prefixes.py: writers of prefixes are killed, and bundles open."""

from __future__ import annotations

import shutil
from pathlib import Path

from attack.prefixes import BUNDLE, attack, check, listed


def test_killed_writers_leave_bundles_that_open() -> None:
    counts, wrong = attack(BUNDLE, 0, 10)
    assert wrong == []
    assert counts["killed at work"] + counts["killed"] >= 5
    assert counts["with a prefix"] > 0


def test_the_check_sees_what_is_wrong(tmp_path: Path) -> None:
    path = Path(shutil.copytree(BUNDLE, tmp_path / "b"))
    before = {file.name for file in path.iterdir()}
    assert check(path, before) == []
    (path / "prefix-left.kv").write_text("not what a writer clears")
    assert check(path, before) == ["left behind: prefix-left.kv"]
    (path / "weights.bin").unlink()
    assert ["BundleError" in what for what in check(path, before)] == [True]
    assert "model.onnx" in listed(Path(BUNDLE))
