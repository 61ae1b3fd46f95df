"""One-token mode beside transformers' generate: same weights, same threads, one run. (What a step costs: `mars-export bench`.)

    python benchmarks/one_token.py BUNDLE MODEL_DIRECTORY [--threads 2] [--rounds 7] [--json FILE]

BUNDLE must be an fp32 export of MODEL_DIRECTORY (a plain Hugging Face directory). Rounds are interleaved; medians are printed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

from mars_export.runtime import GenerationConfig, Session

PROMPT = "The history of the steam engine begins in the first century, when"
NEW_TOKENS = 48


def timed(work: Callable[[], object]) -> float:
    begun = perf_counter()
    work()
    return perf_counter() - begun


def ours(session: Session) -> Callable[[], object]:
    config = GenerationConfig(tau=1.0, max_new_tokens=NEW_TOKENS, eos_ids=())
    return lambda: session.generate(PROMPT, config)


def theirs(directory: Path, prompt_ids: list[int]) -> Callable[[], object]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.tensor([prompt_ids])
    model.generation_config.eos_token_id = None
    return lambda: model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(args.threads)
    session = Session.open(args.bundle, threads=args.threads)
    works = {
        "one-token mode, 48 tokens": ours(session),
        "transformers generate, 48 tokens": theirs(args.model, session.encode(PROMPT)),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(args.rounds):
        for name, work in works.items():
            times[name].append(timed(work))
    medians = {name: median(values) * 1000 for name, values in times.items()}
    for name, value in medians.items():
        print(f"{name:34} {value:8.1f} ms")
    ratio = medians["transformers generate, 48 tokens"] / medians["one-token mode, 48 tokens"]
    print(f"one-token mode is {ratio:.2f}x as fast as transformers")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json.dumps(
                {"threads": args.threads, "rounds": args.rounds, "median_ms": medians, "ratio": ratio},
                indent=2,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
