"""The table of speeds on a GPU. It imports nothing of ours: gpu_prove.py runs where we are not installed."""

from __future__ import annotations

from collections.abc import Sequence

COLUMNS = ("model", "precision", "batch", "mode", "tokens/s", "first token, ms", "speed-up")


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows)]
