"""Writes accept.json and uniform.json: what runtime/accept.py, runtime/decode/sample.py and their C++ twins
must give, exactly.

`PYTHONPATH=tests python tests/conformance/make.py`, then read the diff. The expected values come from this
file's own rules, never from ours. A confidence is the decimal form of a float32 (compare it with tau as
doubles); NaN and infinities are the strings "nan" and "inf". A seed is a string, because it may exceed what a
JSON number holds; a uniform number is numerator / 2**53.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
from support.makers import GAMMA, MASK64, mix, text_of, write
from support.paths import CONFORMANCE

METRICS = ("probability", "margin", "entropy")
JUST_BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
NINE = float(np.float32(0.9))  # 0.89999998: below the double 0.9
TENTH = float(np.float32(0.1))  # 0.10000000149: above the double 0.1
SMALLEST = float(np.float32(1e-45))

# name, token_ids, confidences, tau, metric, eos_ids, limit, accepted
BY_HAND: list[tuple[str, list[int], list[float], float, str, list[int], int, int]] = [
    ("nothing predicted", [], [], 0.5, "probability", [], 4, 0),
    ("limit 0", [1, 2], [1.0, 1.0], 0.5, "probability", [], 0, 0),
    ("the first needs no confidence", [1, 2], [0.0, 1.0], 0.5, "probability", [], 4, 2),
    ("the first may be NaN", [1, 2], [math.nan, 1.0], 0.5, "probability", [], 4, 2),
    ("stop at the first that fails", [1, 2, 3, 4], [0.9, 0.9, 0.4, 0.9], 0.5, "probability", [], 4, 2),
    ("equality passes", [1, 2], [0.5, 0.5], 0.5, "probability", [], 4, 2),
    ("float32 0.9 is below 0.9", [1, 2], [NINE, NINE], 0.9, "probability", [], 4, 1),
    ("float32 0.1 is above 0.1", [1, 2], [TENTH, TENTH], 0.1, "probability", [], 4, 2),
    ("entropy: float32 0.1 is above 0.1", [1, 2], [TENTH, TENTH], 0.1, "entropy", [], 4, 1),
    ("tau 1 is one token even when p is 1", [1, 2, 3], [1.0, 1.0, 1.0], 1.0, "probability", [], 4, 1),
    ("tau above 1 is one token", [1, 2], [1.0, 1.0], 1.5, "probability", [], 4, 1),
    ("margin: tau 1 is one token", [1, 2], [1.0, 1.0], 1.0, "margin", [], 4, 1),
    ("just below tau 1 all that is certain passes", [1, 2, 3], [0.5, 1.0, JUST_BELOW_ONE], JUST_BELOW_ONE,
     "probability", [], 4, 3),
    ("p just below 1 fails a tau between it and 1", [1, 2], [1.0, JUST_BELOW_ONE], 0.99999999, "probability",
     [], 4, 1),
    ("tau 0 takes all", [1, 2, 3], [0.0, 0.0, SMALLEST], 0.0, "probability", [], 4, 3),
    ("tau 0 refuses NaN", [1, 2, 3], [0.5, math.nan, 1.0], 0.0, "probability", [], 4, 1),
    ("tau 0 refuses a negative margin", [1, 2], [0.5, -0.1], 0.0, "margin", [], 4, 1),
    ("smallest float32 against tau 0.5", [1, 2], [1.0, SMALLEST], 0.5, "probability", [], 4, 1),
    ("entropy: small passes", [1, 2, 3], [2.0, 0.1, 0.3], 0.25, "entropy", [], 4, 2),
    ("entropy: tau 0 is one token", [1, 2], [0.0, 0.0], 0.0, "entropy", [], 4, 1),
    ("entropy: tau 1 is an ordinary bound", [1, 2, 3], [0.0, 1.0, 1.5], 1.0, "entropy", [], 4, 2),
    ("entropy: 0 passes the smallest bound", [1, 2], [3.0, 0.0], SMALLEST, "entropy", [], 4, 2),
    ("entropy: NaN fails", [1, 2], [0.0, math.nan], 9.0, "entropy", [], 4, 1),
    ("entropy: infinity fails", [1, 2], [0.0, math.inf], 9.0, "entropy", [], 4, 1),
    ("nothing after EOS", [1, 7, 3], [0.9, 0.9, 0.9], 0.5, "probability", [7], 4, 2),
    ("EOS first", [7, 2, 3], [0.9, 0.9, 0.9], 0.5, "probability", [7], 4, 1),
    ("an EOS that fails is not taken", [1, 7, 3], [0.9, 0.1, 0.9], 0.5, "probability", [7], 4, 1),
    ("several EOS ids", [1, 8, 7], [0.9, 0.9, 0.9], 0.5, "probability", [7, 8], 4, 2),
    ("EOS last", [1, 2, 7], [0.9, 0.9, 0.9], 0.5, "probability", [7], 4, 3),
    ("limit inside a run", [1, 2, 3, 4], [0.9, 0.9, 0.9, 0.9], 0.5, "probability", [], 3, 3),
    ("limit 1", [1, 2, 3], [0.9, 0.9, 0.9], 0.5, "probability", [], 1, 1),
    ("limit beyond", [1, 2], [0.9, 0.9], 0.5, "probability", [], 100, 2),
    ("a large token id", [2**31 - 1, 2], [0.9, 0.9], 0.5, "probability", [2**31 - 1], 4, 1),
]  # fmt: skip


def expected(
    token_ids: list[int], confidences: list[float], tau: float, metric: str, eos_ids: list[int], limit: int
) -> int:
    """The rule as a search for the longest acceptable prefix; the product decides token by token."""

    def acceptable(length: int) -> bool:
        later = confidences[1:length]
        sure = all(c <= tau for c in later) if metric == "entropy" else all(c >= tau for c in later)
        several = length <= 1 or (tau > 0 if metric == "entropy" else tau < 1)
        return (
            length <= limit and sure and several and not set(token_ids[: max(length - 1, 0)]) & set(eos_ids)
        )

    return max(length for length in range(len(token_ids) + 1) if acceptable(length))


def accept_cases() -> list[dict[str, Any]]:
    names = ("name", "token_ids", "confidences", "tau", "metric", "eos_ids", "limit", "accepted")
    cases = [dict(zip(names, case, strict=True)) for case in BY_HAND]
    for case in cases:
        assert case["accepted"] == expected(*[case[n] for n in names[1:-1]]), case["name"]
    draw = random.Random(2604)
    for i in range(120):
        metric, count = METRICS[i % 3], draw.randint(1, 8)
        scale = 2.0 if metric == "entropy" else 1.0
        sure = [draw.random() ** (3 if metric == "entropy" else 0.3) * scale for _ in range(count)]
        confidences = [float(np.float32(c)) for c in sure]
        tau = draw.choice([draw.random() * scale, draw.choice(confidences)])
        arguments = (
            [draw.randint(0, 9) for _ in range(count)],
            confidences,
            tau,
            metric,
            draw.sample(range(10), draw.randint(0, 2)),
            draw.randint(0, 10),
        )
        cases.append(dict(zip(names, (f"random {i}", *arguments, expected(*arguments)), strict=True)))
    for case in cases:
        case["confidences"] = [c if math.isfinite(c) else str(c) for c in case["confidences"]]
    return cases


def splitmix64(seed: int, count: int) -> list[int]:
    """The first `count` outputs of Vigna's generator."""
    return [mix((seed + i * GAMMA) & MASK64) for i in range(count)]


def uniform_cases() -> list[dict[str, Any]]:
    cases = []
    for seed in (0, 1, 42, 1234567, 2**53 + 1, 2**63, 2**64 - 1):
        outputs = splitmix64(seed, 4097)
        cases += [
            {"seed": str(seed), "position": p, "numerator": outputs[p] >> 11}
            for p in (0, 1, 2, 3, 7, 255, 4096)
        ]
    return cases


def files() -> dict[Path, str]:
    made = {"accept": accept_cases(), "uniform": uniform_cases()}
    return {CONFORMANCE / f"{name}.json": text_of(cases) for name, cases in made.items()}


if __name__ == "__main__":
    write(files())
