"""Times of many requests as figures: percentiles, rates, and what a curve of memory says."""

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


def growth(seconds: Sequence[float], sizes: Sequence[int]) -> dict[str, float]:
    """Memory at the start, at the end, and its slope over the second half: MiB and MiB an hour."""
    if len(sizes) < 4:
        return {}
    half, mib = len(sizes) // 2, np.asarray(sizes) / 2**20
    slope = np.polyfit(np.asarray(seconds[half:]), mib[half:], 1)[0]
    return {
        "first_mib": round(float(mib[0]), 1),
        "half_mib": round(float(mib[half]), 1),
        "last_mib": round(float(mib[-1]), 1),
        "most_mib": round(float(mib.max()), 1),
        "slope_mib_per_hour": round(float(slope) * 3600, 2),
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
