"""The memory figure of benchmarks/prefix.py, over few talks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT


def test_saved_entries_stay_under_the_budget(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "prefix.py"), "--only", "memory", "--talks", "400"]
    subprocess.run([*command, "--json", str(tmp_path / "m.json")], check=True, timeout=120)
    found = json.loads((tmp_path / "m.json").read_text())["memory"]
    assert found["budget"] * 0.9 < found["most_bytes"] <= found["budget"]
    assert (found["held_otherwise"], found["failed"], found["checks"]) == (0, 0, 4)
    assert found["evicted"] > 100
    assert found["hits"] > 300
