"""Writes loops.json and choices.json: what the loop, with any cache block, and the host's choice of a token
must give in every implementation.

`PYTHONPATH=tests python tests/conformance/make_loops.py`, then read the diff. The loops run over a model
without weights: the prediction after a known prefix and some masks is `predict` below. The expected values
come from this file's own slow simulation of one row (docs/decoding.md), never from ours. `taus[n]` holds from
the row's event n on, until the next one.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
from support.makers import GAMMA, MASK64, mix, text_of, write
from support.paths import CONFORMANCE

MASK = 0
PREFILL_CHUNK = 256


def predict(known: list[int], masks: int) -> tuple[int, float]:
    """The model: a token of 1 to 12, and a confidence: a multiple of 2**-24, so exact in float32."""
    state = 0
    for token in known:
        state = mix(state ^ token)
    state = mix(state ^ (masks + 1000))
    return 1 + (state >> 40) % 12, (state & 0xFFFFFF) / 2**24


class Simulation:
    """One row, alone and without a cache: what it accepts, event by event."""

    def __init__(self, case: dict[str, Any], row: dict[str, Any]) -> None:
        self.case, self.row = case, row
        self.known = list(row["prompt"])
        self.runs: list[list[int]] = []
        self.made = self.forwards = self.prefill_forwards = 0
        self.reason: str | None = None

    def look_ahead(self) -> int:
        tau = self.row["taus"][min(len(self.runs), len(self.row["taus"]) - 1)]
        masks = self.row["masks"]
        most = 1 if tau >= 1 else self.case["block"] if masks is None else min(self.case["block"], masks + 1)
        return max(1, min(most, self.row["max_new_tokens"] - self.made))

    def take(self, count: int) -> None:
        """Accept from `count` predictions, the first of which needs no confidence."""
        tau = self.row["taus"][min(len(self.runs), len(self.row["taus"]) - 1)]
        run: list[int] = []
        for i, (token, confidence) in enumerate([predict(self.known, i) for i in range(count)]):
            if i and (confidence < tau or self.reason):
                break
            run.append(token)
            if token in self.row["eos_ids"]:
                self.reason = "eos"
            elif token == self.row["stop_token"]:
                self.reason = "stop"
        self.known += run
        self.made += len(run)
        self.runs.append(run)
        if self.reason is None and self.made == self.row["max_new_tokens"]:
            self.reason = "length"

    def prefill(self) -> int:
        """Chunks before the last one; returns the tokens in them."""
        chunk = min(PREFILL_CHUNK, self.case["max_slots"] or PREFILL_CHUNK)
        self.prefill_forwards = (len(self.known) - 1) // chunk
        return self.prefill_forwards * chunk

    def end(self, reason: str) -> None:
        self.reason = reason
        self.runs.append([])

    def run(self) -> None:
        final, prompt, size = self.prefill(), len(self.known), self.case["cache_block"]
        while self.reason is None:
            if len(self.known) > self.case["max_capacity"]:
                return self.end("capacity")
            room = self.case["max_capacity"] - len(self.known)
            if self.case["max_slots"]:
                room = min(room, self.case["max_slots"] - (len(self.known) - final))
            masks = max(0, min(self.look_ahead() - 1, room))
            filled = len(self.known) - final if final >= prompt else 0
            if size == 1 or final < prompt or filled >= size:
                final, filled = len(self.known), 0
            if size > 1:
                masks = min(masks, size - filled - 1)
            self.forwards += 1
            self.take(masks + 1)
        return None

    def result(self) -> dict[str, Any]:
        self.run()
        return {
            "runs": self.runs,
            "finish_reason": self.reason,
            "forwards": self.forwards,
            "prefill_forwards": self.prefill_forwards,
        }


def loop_cases() -> list[dict[str, Any]]:
    draw = random.Random(7023)
    cases = []
    for i in range(80):
        case: dict[str, Any] = {"name": f"loop {i}", "block": draw.choice([1, 2, 4, 8])}
        case["max_slots"] = draw.choice([None, None, 16, 40])
        cache_block = draw.choice([1, 3, 8, 13])
        case["cache_block"] = 1 if i % 2 else cache_block
        longest = draw.choice([3, 20, 20, 300])
        case["max_capacity"] = longest + draw.choice([0, 1, 7, 30, 500])
        rows = []
        for _ in range(draw.choice([1, 1, 2, 3, 5])):
            tau = draw.choice([0.0, 0.3, 0.5, 0.7, 1.0])
            row: dict[str, Any] = {"prompt": [draw.randint(1, 12) for _ in range(draw.randint(1, longest))]}
            row["taus"] = [tau] if draw.random() < 0.7 else [tau, 0.2, 1.0, 0.5]
            row["masks"] = draw.choice([None, None, 0, 2])
            row["max_new_tokens"] = draw.choice([1, 5, 17, 40])
            row["eos_ids"] = draw.choice([[], [], [12], [1, 7]])
            row["stop_token"] = draw.choice([None, None, None, 5])
            row["expected"] = Simulation(case, row).result()
            rows.append(row)
        cases.append({**case, "rows": rows})
    return cases


def uniform(seed: int, position: int) -> float:
    return (mix((seed + position * GAMMA) & MASK64) >> 11) / 2**53


def choice(
    logits: list[float], settings: dict[str, Any], seen: list[int], position: int
) -> tuple[int, float, float]:
    """Token, confidence, and how near the draw was to another token."""
    factor = np.float32(settings["repetition_penalty"])
    own = [
        float(np.float32(x) / factor if x > 0 else np.float32(x) * factor) if i in seen and factor != 1 else x
        for i, x in enumerate(logits)
    ]
    order = sorted(range(len(own)), key=lambda i: (-own[i], i))
    token, distance = order[0], 1.0
    if settings["temperature"] > 0:
        order = order[: settings["top_k"] or len(order)]
        weights = [math.exp((own[i] - own[order[0]]) / settings["temperature"]) for i in order]
        sums = [math.fsum(weights[: i + 1]) / math.fsum(weights) for i in range(len(weights))]
        kept = next((i + 1 for i, s in enumerate(sums) if s >= settings["top_p"]), len(sums))
        edges = [s / sums[kept - 1] for s in sums[:kept]]
        number = uniform(settings["seed"], position)
        token = order[next(i for i, edge in enumerate(edges) if edge > number)]
        distance = min(
            [abs(edge - number) for edge in edges]
            + [abs(s - settings["top_p"]) for s in sums if settings["top_p"] < 1]
        )
    p = [math.exp(x - max(own)) for x in own]
    p = [x / math.fsum(p) for x in p]
    others = [x for i, x in enumerate(p) if i != token]
    confidence = {
        "probability": p[token],
        "margin": p[token] - max(others),
        "entropy": -math.fsum(x * math.log(x) for x in p if x > 0),
    }
    return token, confidence[settings["metric"]], distance


def choice_cases() -> list[dict[str, Any]]:
    draw = random.Random(11)
    cases = []
    while len(cases) < 90:
        size = draw.choice([2, 5, 12])
        logits = [
            float(np.float32(draw.choice([draw.gauss(0, 3), round(draw.gauss(0, 2))]))) for _ in range(size)
        ]
        settings = {
            "temperature": draw.choice([0.0, 0.5, 1.0, 3.0]),
            "top_k": draw.choice([0, 0, 1, 3, 50]),
            "top_p": draw.choice([1.0, 1.0, 0.9, 0.3]),
            "repetition_penalty": draw.choice([1.0, 1.0, 1.3, 0.5]),
            "metric": draw.choice(["probability", "margin", "entropy"]),
            "seed": draw.randint(0, 99),
        }
        seen, position = [draw.randrange(size) for _ in range(draw.randint(0, 4))], draw.randint(0, 300)
        token, confidence, distance = choice(logits, settings, seen, position)
        if distance > 1e-6:
            cases.append(
                {
                    "logits": logits,
                    **settings,
                    "seen": seen,
                    "position": position,
                    "token": token,
                    "confidence": confidence,
                }
            )
    return cases


def files() -> dict[Path, str]:
    return {
        CONFORMANCE / "loops.json": text_of(loop_cases()),
        CONFORMANCE / "choices.json": text_of(choice_cases()),
    }


if __name__ == "__main__":
    write(files())
