"""Writes masks.json, costs.json, rates.json, splits.json and prompts.json: the choices of the Python planner
in scripted cases, the costs that it learns, and the acceptance probabilities.

`PYTHONPATH=tests python tests/conformance/make_planning.py`, then read the diff: libmars must make the same
choices, bit for bit. That they are good choices is tested by text (test_planner.py, test_exact.py).

A case has a cost table and rows. `passed` of masks.json says for each step which predictions would pass tau,
had their masks been fed: the first character is the next token's, which is accepted in any case, then one for
each mask, "1" for one that passes.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from support.loops import planner_of
from support.makers import text_of, write
from support.paths import CONFORMANCE

from mars_export.runtime.decode.config import GenerationConfig
from mars_export.runtime.decode.sequence import Sequence
from mars_export.runtime.decode.speculation.cost import Cost, LearnedCost
from mars_export.runtime.decode.speculation.drafts import AcceptanceRates, DraftTokens, StepForecast
from mars_export.runtime.decode.speculation.planner import ExactPlanner, TauPlanner

RECORD = LearnedCost.record  # tests replace it, so that they learn nothing
TABLES = [
    [[1, 33.0], [2, 33.0], [4, 35.0], [8, 42.3], [15, 48.9]],
    [[1, 10.5], [2, 11.7], [4, 15.7], [8, 23.0], [16, 35.7]],
    [[1, 12.0], [2, 16.9], [4, 19.7], [8, 25.1], [16, 33.6], [32, 60.0]],
    [[1, 0.001]],
    [[1, 5.0], [2, 4.0], [8, 80.0]],
]


def cost_of(points: list[list[float]]) -> Cost:
    return Cost(tuple((int(at), seconds) for at, seconds in points))


def masks(case: dict[str, Any]) -> list[list[int]]:
    """Masks of each row at each step, all rows running until their script ends."""
    cost = cost_of(case["cost"])
    planner, made = TauPlanner(), []
    rows = [
        Sequence(i, [1], GenerationConfig(masks="auto" if row["is_free"] else row["most"]), ())
        for i, row in enumerate(case["rows"])
    ]
    for step in range(case["steps"]):
        made.append(planner.choose(cost, rows, [row["most"] for row in case["rows"]]))
        for row, fed, script in zip(rows, made[-1], case["rows"], strict=True):
            passed = [c == "1" for c in script["passed"][step][: fed + 1]]
            accepted = 1 + next((k for k in range(fed) if not passed[k + 1]), fed)
            row.pass_rates.record(accepted, passed)
            row.cursor = len(row.tokens)
            row.tokens += [1] * accepted
    return made


def mask_cases() -> list[dict[str, Any]]:
    draw = random.Random(404)
    made = []
    for i in range(40):
        block = draw.choice([1, 2, 4, 8, 8, 16])
        steps = draw.choice([5, 40])
        case: dict[str, Any] = {"name": f"masks {i}", "block": block, "steps": steps}
        case["cost"], rows = draw.choice(TABLES), []
        for _ in range(draw.choice([1, 1, 2, 4])):
            chance = draw.choice([0.0, 0.2, 0.6, 0.95, 1.0])
            passed = [
                "".join("1" if draw.random() < chance else "0" for _ in range(block)) for _ in range(steps)
            ]
            is_free = draw.random() < 0.8
            most = block - 1 if is_free else draw.randrange(block)
            rows.append({"is_free": is_free, "most": most, "passed": passed})
        case["rows"] = rows
        made.append({**case, "masks": masks(case)})
    return made


def cost_cases() -> list[dict[str, Any]]:
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
        curve = draw.choice(curves)
        learned = LearnedCost(cost_of(curve))
        for step in steps:
            RECORD(learned, *step)
        table = [seconds for _, seconds in learned.cost.points]
        made.append({"name": f"costs {i}", "curve": curve, "steps": steps, "table": table})
    return made


def rate_cases() -> list[dict[str, Any]]:
    """`steps`: draft tokens, of a lookup or not, those forced, and what the text has in their place. `table`:
    the acceptance probabilities, first of masks' draft tokens, then of looked-up ones.
    """
    draw, claims, made = random.Random(46), [0.0, 0.05, 0.3, 0.6, 0.9, 0.93, 0.99, 1.0], []
    for i in range(12):
        rates, right, steps = AcceptanceRates(), draw.choice([0.0, 0.5, 0.9, 1.0]), []
        for _ in range(draw.choice([0, 3, 200])):
            count = draw.randint(0, 9)
            confidences = draw.choices(claims, k=count)
            forced = sorted(draw.sample(range(count), draw.choice([0, 0, count // 2])))
            text = [1 if draw.random() < right or k in forced else 2 for k in range(count)]
            text = text[: text.index(2) + 1 if 2 in text else draw.randint(0, count)]
            is_lookup = draw.random() < 0.5
            steps.append([is_lookup, confidences, forced, text])
            source: Any = "prompt_lookup" if is_lookup else "masks"
            draft = DraftTokens((1,) * count, tuple(confidences), source, frozenset(forced))
            rates.record(draft, text)
        table = [
            [rates.probability(source, claim) for claim in claims] for source in ("masks", "prompt_lookup")
        ]
        made.append({"name": f"rates {i}", "steps": steps, "claims": claims, "table": table})
    return made


def split_cases(tables: list[list[list[float]]]) -> list[dict[str, Any]]:
    draw = random.Random(2511)
    cases = []
    for i in range(40):
        case: dict[str, Any] = {"name": f"split {i}", "cost": draw.choice(tables)}
        case |= {"others": draw.choice([0, 0, 0, 2]), "floor": draw.choice([0, 0, 3, 12]), "steps": []}
        planner, num = ExactPlanner(), draw.choice([1, 1, 2, 4])
        for _ in range(draw.choice([3, 8])):
            rows = []
            for _ in range(num):
                sure = draw.choice([0.05, 0.4, 0.9, 0.99])
                probabilities = [round(sure * draw.random() ** 0.2, 4) for _ in range(draw.randint(0, 9))]
                expected, chance = [0.0], 1.0
                for _ in range(draw.randint(0, 9)):
                    chance = round(chance * sure * draw.random() ** 0.1, 4)
                    expected.append(round(expected[-1] + chance, 4))
                row = {"pending": draw.choice([1, 1, 1, 4]), "probabilities": probabilities}
                row |= {"expected": expected, "ending": draw.choice([None, None, sure])}
                rows.append(row | {"room": draw.choice([18, 18, 5, 0])})
            forecasts = [
                StepForecast(
                    r["pending"], tuple(r["probabilities"]), r["ending"], tuple(r["expected"]), r["room"]
                )
                for r in rows
            ]
            plans = planner.choose(cost_of(case["cost"]), forecasts, case["others"], case["floor"])
            feeds = [[plan.pending, plan.draft_tokens, plan.masks] for plan in plans]
            case["steps"].append({"rows": rows, "feeds": feeds})
        cases.append(case)
    return cases


def prompt_cases(tables: list[list[list[float]]]) -> list[dict[str, Any]]:
    """Prompts of one session: `masks` of each, and `rates`, their acceptance probabilities."""
    draw, made = random.Random(2811), []
    for i in range(20):
        table, rates, prompts = draw.choice(tables), AcceptanceRates(), []
        planner = planner_of(cost_of(table))
        for _ in range(draw.choice([1, 4, 20])):
            prompt = {"tokens": draw.choice([1, 7, 50]), "room": draw.choice([18, 18, 5, 0])}
            prompt |= {"num": draw.choice([1, 1, 2, 8, 16])}
            seq = Sequence(0, [1] * prompt["tokens"], GenerationConfig(), (), acceptance_rates=rates)
            seq.block, sure = 8, draw.choice([0.2, 0.9, 1.0])
            num_masks = planner.prompt_plan(seq, prompt["room"], prompt["num"]).masks
            values = [round(sure * draw.random() ** 0.2, 4) for _ in range(num_masks)]
            if values:
                rates.record_prompt(values)
            prompts.append({**prompt, "masks": num_masks, "rates": values})
        made.append({"name": f"prompts {i}", "cost": table, "prompts": prompts})
    return made


def files() -> dict[Path, str]:
    masks = mask_cases()
    splits = split_cases([case["cost"] for case in masks])
    made = {"masks": masks, "costs": cost_cases(), "rates": rate_cases(), "splits": splits}
    made["prompts"] = prompt_cases([case["cost"] for case in masks])
    return {CONFORMANCE / f"{name}.json": text_of(cases) for name, cases in made.items()}


if __name__ == "__main__":
    write(files())
