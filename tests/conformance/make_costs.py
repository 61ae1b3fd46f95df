"""Writes costs.json: the cost table that steps of some shapes and seconds must give, exactly.

`PYTHONPATH=tests python tests/conformance/make_costs.py`, then read the diff. The expected tables come from
this file's own simulation, written from docs/decoding.md ("Step costs"). All numbers are doubles, added and
multiplied in the order written here.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from support.makers import maker, text_of, write
from support.paths import CONFORMANCE

masks = maker("make_masks")
SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]


def table(case: dict[str, Any]) -> list[float]:
    """Seconds of each of SIZES after the steps of the case."""
    ratios, weights, shapes = [1.0] * len(SIZES), [0.0] * len(SIZES), set()
    for rows, slots, seconds in case["steps"]:
        if (rows, slots) in shapes:
            size = min(SIZES, key=lambda n: (abs(n - rows * slots), -n))
            i = SIZES.index(size)
            weights = [weight * 0.999 for weight in weights]
            weight = min(weights[i], 7.0)
            shown = seconds / masks.cost(case["curve"], rows * slots)
            if weight >= 3.0:
                shown = min(shown, 2.0 * ratios[i])
            ratios[i] = (weight * ratios[i] + shown) / (weight + 1.0)
            weights[i] = weight + 1.0
        shapes.add((rows, slots))
    made = []
    for i, size in enumerate(SIZES):
        total, every = 0.0, 0.0
        for j, (ratio, weight) in enumerate(zip(ratios, weights, strict=True)):
            share = weight * 0.25 ** abs(i - j)
            total, every = total + share * ratio, every + share
        made.append(masks.cost(case["curve"], size) * (total / every if every else 1.0))
    return [min(made[i:]) for i in range(len(made))]


def cases() -> list[dict[str, Any]]:
    draw = random.Random(45)
    curves = [[[1, 0.0063], [2, 0.0069], [8, 0.01], [32, 0.0187]], [[1, 0.005], [64, 0.006]], [[1, 1.0]]]
    made: list[dict[str, Any]] = []
    for i in range(12):
        rows, scale, slope = draw.choice([1, 2, 8]), draw.uniform(0.1, 5), draw.uniform(0, 0.2)
        widths = draw.sample(range(1, 81), draw.choice([1, 3, 6]))
        steps = []
        for _ in range(draw.choice([0, 3, 40, 400])):
            slots = draw.choice(widths)
            disturbed = draw.choice([1.0] * 9 + [30.0])
            steps.append([rows, slots, 0.01 * scale * (1 + slope * rows * slots) * disturbed])
        case: dict[str, Any] = {"name": f"costs {i}", "curve": draw.choice(curves), "steps": steps}
        made.append({**case, "table": table(case)})
    return made


def files() -> dict[Path, str]:
    return {CONFORMANCE / "costs.json": text_of(cases())}


if __name__ == "__main__":
    write(files())
