"""Which held-out wordings a checkpoint misses, and how far the assistant's accuracy would move with others.

    python evaluate.py BUNDLE --tasks assistant --taus 1 --no-exact --batch 16 --out evaluation.json
    python misses.py evaluation.json

Reads what evaluate.py wrote of the test rows; decodes nothing. The interval is a Bayesian bootstrap over the
wordings: each gets a random weight, a row weighs the product of those of its clauses.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from itertools import zip_longest
from pathlib import Path

import assistant
import dataset

DRAWS = 4000


def calls(text: str) -> list[object]:
    """The calls of an answer; none if it is not JSON."""
    try:
        made = json.loads(text)
    except ValueError:
        return []
    return made if isinstance(made, list) else []


def wordings() -> dict[str, tuple[str, ...]]:
    """The wordings of every held-out request, by its text."""
    wanted = {row.messages[-1][1] for row in dataset.held_out_rows("assistant")["test"]}
    found: dict[str, tuple[str, ...]] = {}
    index = 0
    while len(found) < len(wanted):
        made = assistant.request(random.Random(f"{dataset.HELD_OUT}:assistant:{index}"), held_out=True)
        if made.text in wanted:
            found.setdefault(made.text, made.wordings)
        index += 1
    return found


def interval(rows: list[tuple[bool, tuple[str, ...]]]) -> tuple[float, float]:
    """95 % of the accuracies that random weights of the wordings give."""
    rng, drawn = random.Random(1), []
    known = sorted({wording for _, clauses in rows for wording in clauses})
    for _ in range(DRAWS):
        weight = {wording: rng.expovariate(1) for wording in known}
        total = right = 0.0
        for is_right, clauses in rows:
            product = 1.0
            for wording in clauses:
                product *= weight[wording]
            total, right = total + product, right + product * is_right
        drawn.append(right / total)
    drawn.sort()
    return drawn[DRAWS // 40], drawn[-DRAWS // 40 - 1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("evaluation", type=Path)
    args = parser.parse_args()
    outputs = json.loads(args.evaluation.read_text())["assistant"]["references"]
    of = wordings()
    rows: list[tuple[bool, tuple[str, ...]]] = []
    seen: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for row, output in zip(dataset.held_out_rows("assistant")["test"], outputs, strict=False):
        clauses = of[row.messages[-1][1]]
        rows.append((output == row.answer, clauses))
        seen.update(clauses)
        if output != row.answer:
            pairs = zip_longest(clauses, json.loads(row.answer), calls(output))
            wrong = [wording for wording, wanted, got in pairs if wording and wanted != got]
            # Behind a call that is missing or too many, the others only moved.
            missed.update(wrong if len(calls(output)) == len(clauses) else wrong[:1])
    low, high = interval(rows)
    right = sum(is_right for is_right, _ in rows)
    print(f"{right} of {len(rows)} rows right, {100 * low:.1f} to {100 * high:.1f} % with other wordings")
    print(f"{len(missed)} of {len(seen)} wordings missed, {missed.total()} times")
    for wording, count in missed.most_common():
        print(f"{count} of {seen[wording]}  {wording}")


if __name__ == "__main__":
    main()
