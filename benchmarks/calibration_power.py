"""How often each valid test shows a bound that truly holds: the choice of calibration/tau/bounds.py,
measured. Prints Markdown.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from mars_export.calibration.tau import bounds

LEVEL, TRIALS, NUISANCE = 0.05, 1000, 0.005
CASES = [  # rows, bound, share of rows that get worse, and better
    (210, 0.02, 0.0, 0.0),
    (500, 0.02, 0.0, 0.0),
    (500, 0.02, 0.004, 0.002),
    (500, 0.02, 0.006, 0.002),
    (500, 0.02, 0.012, 0.008),
    (500, 0.02, 0.02, 0.016),
    (1000, 0.02, 0.006, 0.002),
    (1000, 0.02, 0.012, 0.008),
    (200, 0.05, 0.012, 0.008),
    (500, 0.05, 0.03, 0.02),
]


@cache
def binomial(count: int, probability: float) -> np.ndarray:
    """Probabilities of 0 .. count successes."""
    if probability in (0.0, 1.0):
        return np.eye(count + 1)[count if probability else 0]
    k = np.arange(count + 1)
    ways = np.array([math.lgamma(count + 1) - math.lgamma(i + 1) - math.lgamma(count - i + 1) for i in k])
    return np.asarray(np.exp(ways + k * math.log(probability) + (count - k) * math.log1p(-probability)))


def positive_part(worse: int, better: int, rows: int, bound: float) -> bool:
    """Exact binomial on the rows that got worse."""
    del better
    return bool(binomial(rows, bound)[: worse + 1].sum() <= LEVEL)


def hoeffding_bentkus(worse: int, better: int, rows: int, bound: float) -> bool:
    """Hoeffding-Bentkus on the positive part of the drop."""
    del better
    mean = worse / rows
    if mean >= bound:
        return False
    entropy = (mean * math.log(mean / bound) if mean else 0.0) + (1 - mean) * math.log(
        (1 - mean) / (1 - bound)
    )
    return min(math.exp(-rows * entropy), math.e * binomial(rows, bound)[: worse + 1].sum()) <= LEVEL


@cache
def most_changed(changed: int, rows: int) -> float:
    """Upper confidence bound, at NUISANCE, of the share of rows that change."""
    low, high = changed / rows, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (low, middle) if binomial(rows, middle)[: changed + 1].sum() < NUISANCE else (middle, high)
        )
    return high


def trinomial(worse: int, better: int, rows: int, bound: float) -> bool:
    """Exact test of worse - better, at the largest share of changed rows that the data allow (the tail grows
    with that share).
    """
    net, share = worse - better, most_changed(worse + better, rows)
    if net + 2 > (rows - 1) * bound or share > 0.5:
        return False
    if share < bound:
        return NUISANCE <= LEVEL
    losing = (share + bound) / 2 / share
    tail = sum(
        p * binomial(k, losing)[: (net + k) // 2 + 1].sum()
        for k, p in enumerate(binomial(rows, share))
        if p > 1e-12 and net + k >= 0
    )
    return bool(NUISANCE + tail <= LEVEL)


def betting(drops: np.ndarray, bound: float) -> float:
    return float(np.mean(bounds.p_value(drops, bound, LEVEL) <= LEVEL))


def main() -> None:
    print(
        "| rows | bound | get worse | get better | betting | trinomial | binomial | Hoeffding-Bentkus |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for rows, bound, lose, win in CASES:
        random = np.random.default_rng(1)
        drops = random.choice([1.0, -1.0, 0.0], p=[lose, win, 1 - lose - win], size=(TRIALS, rows))
        counts = list(zip((drops > 0).sum(axis=1).tolist(), (drops < 0).sum(axis=1).tolist(), strict=True))
        shares = [betting(drops, bound)]
        for test in (trinomial, positive_part, hoeffding_bentkus):
            known = {pair: test(*pair, rows, bound) for pair in set(counts)}
            shares.append(sum(known[pair] for pair in counts) / TRIALS)
        print(
            f"| {rows} | {bound:g} | {100 * lose:g} % | {100 * win:g} % | "
            + " | ".join(f"{100 * share:.0f} %" for share in shares)
            + " |"
        )
    print("\n| bound | 90 % confidence | 95 % | 95 %, three metrics | 99 % |\n|---|---|---|---|---|")
    for bound in (0.005, 0.01, 0.02, 0.03, 0.05, 0.1):
        needed = [bounds.items_needed(bound, level) for level in (0.1, 0.05, 0.05 / 3, 0.01)]
        print(f"| {bound:g} | " + " | ".join(map(str, needed)) + " |")


if __name__ == "__main__":
    main()
