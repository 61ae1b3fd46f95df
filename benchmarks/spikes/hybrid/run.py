"""Compares exact mode on hybrid look-alikes with transformers, then measures what a step costs.

python -m spikes.hybrid.run          # in benchmarks/
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mars_export.runtime.decode.config import GenerationConfig
from mars_export.runtime.decode.schedule import Limits, Schedule, run
from mars_export.runtime.decode.sequence import Sequence as Row
from mars_export.runtime.decode.speculation.draft_tokens import DraftTokens

from . import cost, model
from .backend import HybridBackend

MASK = 0


@dataclass(frozen=True, slots=True)
class Compared:
    """`equal` of `texts` are transformers'; tokens and forwards of our decode steps."""

    texts: int
    equal: int
    tokens: int
    forwards: int
    catch_ups: frozenset[int]


class Guesses:
    """Draft tokens from a known text, each wrong with probability `wrong`."""

    def __init__(self, text: Sequence[int], prompt: int, wrong: float, seed: int) -> None:
        self.text, self.prompt, self.wrong, self.draw = text, prompt, wrong, random.Random(seed)

    def propose(self, tokens: Sequence[int], most: int) -> DraftTokens:
        at = len(tokens) - self.prompt
        known = self.text[at : at + min(most, self.draw.randint(0, 7))]
        ids = [1 + self.draw.randrange(60) if self.draw.random() < self.wrong else t for t in known]
        return DraftTokens(tuple(ids), (0.9,) * len(ids), "prompt_lookup")


def compare(layers: str, seed: int, lengths: Sequence[int], count: int, wrong: float = 0.3) -> Compared:
    """Exact mode in one ragged batch of prompts of these `lengths`; texts of `count` tokens."""
    made, draw = model.look_alike(layers, seed), random.Random(seed)
    prompts = [[draw.randrange(1, 61) for _ in range(length)] for length in lengths]
    texts = [model.greedy(made, prompt, count) for prompt in prompts]
    backend = HybridBackend(model.graph_of(made), model.shape_of(made.config), 512)
    rows = []
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        # Answers of several lengths: rows end, and others move to their places.
        config = GenerationConfig(max_new_tokens=count - 5 * (i % 3), exact=True)
        rows.append(Row(i, prompt, config, ()))
        rows[-1].prompt_lookup = Guesses(text, len(prompt), wrong, seed + i)  # type: ignore[assignment]
    schedule = Schedule(backend, 4, MASK, Limits(max_rows=max(1, len(rows) - 1), prefill_tokens=16))
    for _ in run(schedule, rows):
        pass
    found = [row.tokens[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
    limits = [row.config.max_new_tokens for row in rows]
    equal = sum(a == text[:n] for a, text, n in zip(found, texts, limits, strict=True))
    catch_ups = frozenset(n for _, n in backend.steps)
    return Compared(len(rows), equal, sum(map(len, found)), len(backend.steps), catch_ups)


def compared(seeds: int) -> Iterator[str]:
    for layers in ("lf", "lllf", "fl", "llfllf"):
        of = [compare(layers, seed, (3, 40, 17, 1, 64), 60) for seed in range(seeds)]
        equal, texts = sum(c.equal for c in of), sum(c.texts for c in of)
        tokens, forwards = sum(c.tokens for c in of), sum(c.forwards for c in of)
        yield f"{layers}: {equal} of {texts} texts equal transformers'; {tokens} tokens, {forwards} forwards"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=4, help="look-alikes of each kind")
    parser.add_argument("--only-cost", action="store_true")
    args = parser.parse_args()
    if not args.only_cost:
        for line in compared(args.seeds):
            print(line, flush=True)
    print(cost.table())


if __name__ == "__main__":
    main()
