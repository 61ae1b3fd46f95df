"""Rows of a calibration text."""

from __future__ import annotations

import json
from pathlib import Path


def write_rows(path: Path, count: int = 12) -> Path:
    rows = []
    for i in range(count):
        turns = [{"role": "user", "content": f"the number after {i} in the list"}]
        rows.append({"messages": turns, "answer": f"it is {i + 1}", "score": "exact_match"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
