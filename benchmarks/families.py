"""The table of docs/families.md: every family against transformers, on tiny random checkpoints.

    python benchmarks/families.py

Largest error of a logit over 45 positions, fed whole and in pieces, in both KV layouts; and greedy answers at
tau 0.3, in a ragged batch, both loops, that are token for token those of the plain sampler of tests/support.
Exits with 1 where a logit is off by 1e-4 or an answer differs.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support import families

BOUND = 1e-4


def main() -> int:
    torch.set_num_threads(1)
    by_family: dict[str, list[str]] = defaultdict(list)
    for name, made in families.ALL.items():
        by_family[made.family].append(name)
    print("| `model_type` | checkpoints | logit error, static | delta | answers equal |")
    print("|---|---|---|---|---|")
    is_good = True
    for family, names in by_family.items():
        errors, equal, answers = [], 0, 0
        for layout in ("static", "delta"):
            found = [families.judge(families.ALL[name], layout) for name in names]
            errors.append(max(one.logit_error for one in found))
            equal += sum(one.equal for one in found)
            answers += sum(one.answers for one in found)
        is_good &= max(errors) < BOUND and equal == answers
        cells = (f"`{family}`", len(names), *(f"{error:.1e}" for error in errors), f"{equal} of {answers}")
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
