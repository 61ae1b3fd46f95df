"""Writes masks.json: the number of masks that an adaptive number of masks takes at each step, which every
implementation must reproduce.

`PYTHONPATH=tests python tests/conformance/make_masks.py`, then read the diff. A case has a cost table and
rows; `passed` says for each step which predictions would pass tau, had their masks been fed: the first
character is the next token's, which is accepted in any case, then one for each mask, "1" for one that passes.
The expected masks come from this file's own simulation, written from docs/decoding.md. All numbers are
doubles, added and multiplied in the order written here.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from support.makers import text_of, write
from support.paths import CONFORMANCE

KEEP, FIRST, BELIEF, MISSED, TRIALS = 0.98, 0.5, 1.0, 0.7, 0.015


def cost(points: list[list[float]], positions: float) -> float:
    """Linear between the points, constant before the first, with the last slope after the last; none is
    dearer than a later one.
    """
    table: list[tuple[float, float]] = []
    for at, seconds in points:
        table.append((at, min([seconds, *(s for later, s in points if later > at)])))
    if positions <= table[0][0] or len(table) == 1:
        return table[0][1]
    high = next((i for i, (at, _) in enumerate(table) if at >= positions), len(table) - 1)
    (low_at, low), (high_at, dear) = table[high - 1], table[high]
    return low + (dear - low) * ((positions - low_at) / (high_at - low_at))


class Simulation:
    """One batch whose rows run until their script ends, all of the same length."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, self.saved = case, 0.0
        self.rows = case["rows"]
        self.tried = [[0.0] * case["block"] for _ in self.rows]
        self.passed = [[0.0] * case["block"] for _ in self.rows]
        self.behind = ["" for _ in self.rows]
        self.pending = [1] * len(self.rows)

    def expected(self, i: int, masks: int) -> float:
        seen, good = 0.0, 0.0
        for k in range(1, self.case["block"]):
            seen = seen + self.tried[i][k]
            good = good + self.passed[i][k]
        level = (good + FIRST) / (seen + 1.0)
        tokens, chance = 1.0, 1.0
        for k in range(1, masks + 1):
            share = (self.passed[i][k] + BELIEF * level) / (self.tried[i][k] + BELIEF)
            if self.behind[i][k - 1 : k] == "0":
                share = share * MISSED
            chance = chance * share
            tokens = tokens + chance
        return tokens

    def certainty(self) -> float:
        total = 0.0
        for tried, passed in zip(self.tried, self.passed, strict=True):
            total = total + (passed[0] + 1.0) / (tried[0] + 1.0)
        return total / len(self.rows)

    def fed(self, masks: int) -> list[int]:
        return [min(masks, row["most"]) if row["is_free"] else row["most"] for row in self.rows]

    def rate(self, masks: int) -> float:
        tokens = [self.expected(i, m) for i, m in enumerate(self.fed(masks))]
        total = tokens[0]
        for more in tokens[1:]:
            total = total + more
        slots = max(t + m for t, m in zip(tokens, self.fed(masks), strict=True))
        return total / cost(self.case["cost"], len(self.rows) * slots)

    def seconds(self, masks: int) -> float:
        slots = max(p + m for p, m in zip(self.pending, self.fed(masks), strict=True))
        return cost(self.case["cost"], len(self.rows) * slots)

    def choose(self) -> list[int]:
        widest = max((row["most"] for row in self.rows if row["is_free"]), default=0)
        if widest == 0:
            return self.fed(0)
        best = 0
        for masks in range(widest + 1):
            if self.rate(masks) >= self.rate(best):
                best = masks
        self.saved = min(self.saved + TRIALS * self.certainty() * self.seconds(best), self.seconds(widest))
        trial = min(2 * best + 1, widest)
        values = [self.expected(i, m) for i, m in enumerate(self.fed(trial))]
        tokens = values[0]
        for more in values[1:]:
            tokens = tokens + more
        lost = tokens * (1.0 / self.rate(trial) - 1.0 / self.rate(best))
        if trial > best and lost <= self.saved:
            self.saved = self.saved - lost
            best = trial
        return self.fed(best)

    def run(self) -> list[list[int]]:
        """Masks of each row at each step."""
        made = []
        for step in range(self.case["steps"]):
            masks = self.choose()
            for i, (row, fed) in enumerate(zip(self.rows, masks, strict=True)):
                passed = row["passed"][step][: fed + 1]
                for k, mark in enumerate(passed):
                    self.tried[i][k] = self.tried[i][k] * KEEP + 1.0
                    self.passed[i][k] = self.passed[i][k] * KEEP + (1.0 if mark == "1" else 0.0)
                self.pending[i] = 1 + (passed[1:] + "0").index("0")
                self.behind[i] = passed[self.pending[i] + 1 :]
            made.append(masks)
        return made


def cases() -> list[dict[str, Any]]:
    draw = random.Random(404)
    tables = [
        [[1, 33.0], [2, 33.0], [4, 35.0], [8, 42.3], [15, 48.9]],
        [[1, 10.5], [2, 11.7], [4, 15.7], [8, 23.0], [16, 35.7]],
        [[1, 12.0], [2, 16.9], [4, 19.7], [8, 25.1], [16, 33.6], [32, 60.0]],
        [[1, 0.001]],
        [[1, 5.0], [2, 4.0], [8, 80.0]],
    ]
    made = []
    for i in range(40):
        block = draw.choice([1, 2, 4, 8, 8, 16])
        steps = draw.choice([5, 40])
        case: dict[str, Any] = {
            "name": f"masks {i}",
            "block": block,
            "steps": steps,
            "cost": draw.choice(tables),
        }
        rows = []
        for _ in range(draw.choice([1, 1, 2, 4])):
            chance = draw.choice([0.0, 0.2, 0.6, 0.95, 1.0])
            passed = [
                "".join("1" if draw.random() < chance else "0" for _ in range(block)) for _ in range(steps)
            ]
            is_free = draw.random() < 0.8
            rows.append(
                {
                    "is_free": is_free,
                    "most": block - 1 if is_free else draw.randrange(block),
                    "passed": passed,
                }
            )
        case["rows"] = rows
        made.append({**case, "masks": Simulation(case).run()})
    return made


def files() -> dict[Path, str]:
    return {CONFORMANCE / "masks.json": text_of(cases())}


if __name__ == "__main__":
    write(files())
