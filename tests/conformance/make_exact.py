"""Writes exact.json: exact mode's loop, as every implementation must have it.

`PYTHONPATH=tests python tests/conformance/make_exact.py`, then read the diff. In exact.json the prediction
behind known tokens and some masks is `predict` of make_loops.py; draft tokens that are fed count as known.
Expected values come from this file's own slow simulation of one row (docs/decoding.md): `fed` are [known,
draft tokens, masks] of each forward but pieces of a prompt, `runs` what each gave.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from support.makers import maker, text_of, write
from support.paths import CONFORMANCE

loops = maker("make_loops")


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


def files() -> dict[Path, str]:
    return {CONFORMANCE / "exact.json": text_of(loop_cases())}


if __name__ == "__main__":
    write(files())
