"""Tokens a second of a bundle on a device, as a row of a table for each batch and way of decoding.

    python benchmarks/gpu/speed.py BUNDLE [--device cuda] [--rows 16]

The last line is JSON with the rows (gpu/table.py). Rounds are interleaved; speed-ups are over one token at a
time in the same engine and batch, within a round.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from gpu.table import table
from mars_export import GenerationConfig, Session
from mars_export.calibration.rounds import interleaved

MODES: dict[str, dict[str, Any]] = {"one token": {"tau": 1.0}, "tau 0.95": {"tau": 0.95}, "exact": {}}
BATCHES, PROMPT, ANSWER, ROUNDS = (1, 4, 8, 16), 128, 64, 3


def measured(session: Session, name: str, num_prompts: int) -> list[list[str]]:
    manifest, engine = session.bundle.manifest, session.variant.engine
    high = min(manifest.model.vocab_size, manifest.tokens.mask)
    room = session.backend.max_capacity - ANSWER - 2 * manifest.block
    draw = np.random.default_rng(1)
    prompts = [draw.integers(0, high, min(PROMPT, room)).tolist() for _ in range(num_prompts)]
    first = 1000 * median(_first_token(session, prompt) for prompt in prompts[:8])
    rows = []
    for batch in BATCHES:
        if batch > num_prompts or (engine is not None and batch > engine.max_rows):
            continue
        rates: dict[str, list[float]] = {mode: [] for mode in MODES}
        for number, _, mode in interleaved(list(MODES), 1, ROUNDS + 1):
            rate = _tokens_per_second(session, prompts, MODES[mode], batch)
            if number:  # the first round warms up
                rates[mode].append(rate)
        for mode, values in rates.items():
            gain = median(v / one for v, one in zip(values, rates["one token"], strict=True))
            row = (name, session.variant.precision, batch, mode, f"{median(values):.0f}")
            rows.append([*map(str, row), f"{first:.1f}", f"{gain:.2f}"])
    return rows


def _first_token(session: Session, prompt: list[int]) -> float:
    began = perf_counter()
    session.generate(prompt, GenerationConfig(max_new_tokens=1))
    return perf_counter() - began


def _tokens_per_second(
    session: Session, prompts: Sequence[list[int]], mode: dict[str, Any], batch: int
) -> float:
    config = GenerationConfig(max_new_tokens=ANSWER, eos_ids=(), **mode)
    began = perf_counter()
    answers = list(session.generate_each(prompts, config, batch=batch))
    return sum(answer.stats.tokens for answer in answers) / (perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=16, help="prompts")
    args = parser.parse_args()
    session = Session.open(args.bundle, args.device, cache_bytes=0)
    rows = measured(session, args.bundle.name.removesuffix(".bundle"), args.rows)
    print("\n".join(table(rows)))
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
