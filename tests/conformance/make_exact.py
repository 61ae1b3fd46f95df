"""Writes exact.json and splits.json: exact mode's loop and its choice of feeds, as every implementation must
have them.

`PYTHONPATH=tests python tests/conformance/make_exact.py`, then read the diff. In exact.json the prediction
behind known tokens and some masks is `predict` of make_loops.py; draft tokens that are fed count as known.
Expected values come from this file's own slow simulation of one row (docs/decoding.md): `fed` are [known,
draft tokens, masks] of each forward but pieces of a prompt, `runs` what each gave. In splits.json all numbers
are doubles, added and multiplied in the order written here.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from support.makers import maker, text_of, write
from support.paths import CONFORMANCE

TRIALS = 0.015

loops, masks = maker("make_loops"), maker("make_masks")


def simulated(case: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """One row alone with a fixed number of masks: no cache, no cursor."""
    known, made, draft_tokens = list(row["prompt"]), 0, []
    runs: list[list[int]] = []
    fed: list[list[int]] = []
    accepted_draft_tokens = 0
    chunk = min(256, case["max_slots"] or 256)
    pending = (len(known) - 1) % chunk + 1  # the prompt's pieces before the last are read by then
    reason = None
    most = case["block"] + 1 if case["block"] > 1 else 0
    if row["masks"] != "full":
        most = min(most, row["masks"])
    while reason is None:
        if len(known) > case["max_capacity"]:
            runs.append([])
            reason = "capacity"
            break
        room = case["max_capacity"] - len(known)
        if case["max_slots"]:
            room = min(room, case["max_slots"] - pending)
        if case["max_outputs"]:
            room = min(room, case["max_outputs"] - 1)
        left = row["max_new_tokens"] - made
        end = next((i for i, token in enumerate(draft_tokens) if token in row["eos_ids"]), None)
        usable = draft_tokens if end is None else draft_tokens[:end]
        usable = usable[: max(0, min(left - 1, room))]
        ends = len(usable) < len(draft_tokens) and draft_tokens[len(usable)] in row["eos_ids"]
        masks = 0 if ends else max(0, min(most, left - 2 - len(usable), room - len(usable)))
        fed.append([pending, len(usable), masks])
        own = [loops.predict([*known, *usable[:j]], 0)[0] for j in range(len(usable) + 1)]
        guessed = [loops.predict([*known, *usable], i)[0] for i in range(1, masks + 1)]
        run: list[int] = []
        for j, token in enumerate(own):
            run.append(token)
            if token in row["eos_ids"]:
                reason = "eos"
            elif token == row["stop_token"]:
                reason = "stop"
            if reason or len(run) == left or j == len(usable) or usable[j] != token:
                break
        runs.append(run)
        known += run
        made += len(run)
        accepted_draft_tokens += sum(one == other for one, other in zip(run, usable, strict=False))
        pending = 1
        draft_tokens = guessed if len(run) == len(own) else []
        if reason is None and made == row["max_new_tokens"]:
            reason = "length"
    return {
        "runs": runs, "fed": fed, "finish_reason": reason,
        "draft_tokens": sum(p for _, p, _ in fed), "accepted_draft_tokens": accepted_draft_tokens,
    }  # fmt: skip


def loop_cases() -> list[dict[str, Any]]:
    draw = random.Random(2507)
    cases = []
    for i in range(60):
        case: dict[str, Any] = {"name": f"exact {i}", "block": draw.choice([1, 2, 4, 8])}
        case["max_slots"] = draw.choice([None, None, 16, 40])
        case["max_outputs"] = draw.choice([None, None, 8, 15])
        longest = draw.choice([3, 20, 300])
        case["max_capacity"] = longest + draw.choice([0, 1, 7, 30, 500])
        rows = []
        for _ in range(draw.choice([1, 1, 2, 3, 5])):
            row: dict[str, Any] = {"prompt": [draw.randint(1, 12) for _ in range(draw.randint(1, longest))]}
            row["masks"] = draw.choice(["full", "full", "full", 0, 2])
            row["max_new_tokens"] = draw.choice([1, 2, 5, 17, 40])
            row["eos_ids"] = draw.choice([[], [], [12], [1, 7]])
            row["stop_token"] = draw.choice([None, None, None, 5])
            row["expected"] = simulated(case, row)
            rows.append(row)
        cases.append({**case, "rows": rows})
    return cases


class Choice:
    """The splits of one batch, step by step."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, self.saved = case, 0.0

    def cost(self, positions: float) -> float:
        return masks.cost(self.case["cost"], positions)

    def choose(self, rows: list[dict[str, Any]]) -> list[list[int]]:
        num, floor = len(rows) + self.case["others"], self.case["floor"]
        widest = max(
            r["pending"] + min(r["room"], len(r["probabilities"]) + len(r["expected"]) - 1) for r in rows
        )
        speed = self.speed(rows, num)
        least = max(r["pending"] for r in rows)
        best: tuple[float, int, list[list[int]]] | None = None
        for width in range(least, widest + 1):
            each = [self.split(r, width, speed, num) for r in rows]
            total = each[0][0]
            for value, _ in each[1:]:
                total = total + value
            total = total - speed * self.cost(num * max(width, floor))
            if best is None or total > best[0]:
                best = (total, width, [feed for _, feed in each])
        assert best is not None
        feeds = best[2]
        price = self.cost(num * max(best[1], floor))
        self.saved = min(self.saved + TRIALS * price, self.cost(num * max(widest, floor)))
        wide = [self.wider(r, feed) for r, feed in zip(rows, feeds, strict=True)]
        lost = self.cost(num * max(floor, *map(sum, wide))) - self.cost(num * max(floor, *map(sum, feeds)))
        if wide != feeds and lost <= self.saved:
            self.saved = self.saved - lost
            feeds = wide
        return feeds

    def speed(self, rows: list[dict[str, Any]], num: int) -> float:
        best = 0.0
        for masks in range(max(len(r["expected"]) for r in rows)):
            total, held = 0.0 + self.case["others"], 0.0
            for r in rows:
                m = min(masks, len(r["expected"]) - 1)
                failing = 1.0 - self.all_hold(r, m)
                total = total + (1.0 + r["expected"][m] + failing) / (1.0 + failing)
                held = max(held, r["expected"][m])
            best = max(best, total / self.cost(num * (1.0 + masks + held)))
        return best

    def all_hold(self, row: dict[str, Any], masks: int) -> float:
        return row["expected"][masks] - row["expected"][masks - 1] if masks else 1.0

    def split(self, row: dict[str, Any], width: int, speed: float, num: int) -> tuple[float, list[int]]:
        """Best value and feed of one row in a step of `width` slots: every number of draft tokens and masks
        is tried.
        """
        pending, probabilities, expected = row["pending"], row["probabilities"], row["expected"]
        space = min(width - pending, row["room"])
        if space <= 0:
            return 1.0, [pending, 0, 0]
        ending = 0.0 if row["ending"] is None else row["ending"]
        best: tuple[float, list[int]] | None = None
        tokens = chance = 1.0
        for p in range(min(space, len(probabilities)) + 1):
            if p:
                chance = chance * probabilities[p - 1]
                tokens = tokens + chance
            masks = 0
            for m in range(min(space - p, len(expected) - 1) + 1):
                if self.later(row, m, speed, num) > self.later(row, masks, speed, num):
                    masks = m
            left, held = len(probabilities) - p, 0.0
            for probability in reversed(probabilities[p:]):
                held = probability * (1.0 + held)
            rest = held - speed * self.cost(num * (1.0 + left)) / num if left else 0.0
            future = (1.0 - ending) * self.later(row, masks, speed, num) + ending * rest
            value = tokens + chance * future
            if best is None or value > best[0]:
                best = (value, [pending, p, masks])
        assert best is not None
        return best

    def later(self, row: dict[str, Any], masks: int, speed: float, num: int) -> float:
        if masks == 0:
            return 0.0
        extra = speed * (self.cost(num * (1.0 + masks)) - self.cost(num)) / num
        return (row["expected"][masks] - extra) / (2.0 - self.all_hold(row, masks))

    def wider(self, row: dict[str, Any], feed: list[int]) -> list[int]:
        if row["ending"] is not None:
            return feed
        known, draft_tokens, masks = feed
        return [
            known,
            draft_tokens,
            max(masks, min(2 * masks + 1, len(row["expected"]) - 1, row["room"] - draft_tokens)),
        ]


def split_cases() -> list[dict[str, Any]]:
    draw = random.Random(2511)
    tables = [case["cost"] for case in masks.cases()]
    cases = []
    for i in range(40):
        case: dict[str, Any] = {"name": f"split {i}", "cost": draw.choice(tables)}
        case |= {"others": draw.choice([0, 0, 0, 2]), "floor": draw.choice([0, 0, 3, 12]), "steps": []}
        choice, num = Choice(case), draw.choice([1, 1, 2, 4])
        for _ in range(draw.choice([3, 8])):
            rows = []
            for _ in range(num):
                sure = draw.choice([0.05, 0.4, 0.9, 0.99])
                probabilities = [round(sure * draw.random() ** 0.2, 4) for _ in range(draw.randint(0, 9))]
                expected, chance = [0.0], 1.0
                for _ in range(draw.randint(0, 9)):
                    chance = round(chance * sure * draw.random() ** 0.1, 4)
                    expected.append(round(expected[-1] + chance, 4))
                row = {
                    "pending": draw.choice([1, 1, 1, 4]),
                    "probabilities": probabilities,
                    "expected": expected,
                }
                rows.append(
                    row | {"ending": draw.choice([None, None, sure]), "room": draw.choice([18, 18, 5, 0])}
                )
            case["steps"].append({"rows": rows, "feeds": choice.choose(rows)})
        cases.append(case)
    return cases


def files() -> dict[Path, str]:
    return {
        CONFORMANCE / "exact.json": text_of(loop_cases()),
        CONFORMANCE / "splits.json": text_of(split_cases()),
    }


if __name__ == "__main__":
    write(files())
