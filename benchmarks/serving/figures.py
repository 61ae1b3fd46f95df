"""Times of many requests as figures: percentiles and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95, p99 and the longest, in the values' unit; nothing of nothing."""
    if not values:
        return {}
    points = np.percentile(values, (50, 95, 99))
    return {
        **{f"p{p}": round(float(v), 4) for p, v in zip((50, 95, 99), points, strict=True)},
        "max": round(max(values), 4),
    }


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """A Markdown table; a name with dots looks into what is nested."""

    def cell(row: dict[str, Any], name: str) -> str:
        value: Any = row
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    lines = [columns, ["---"] * len(columns), *([cell(row, c) for c in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
