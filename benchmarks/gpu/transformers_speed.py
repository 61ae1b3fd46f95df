"""Tokens a second of transformers' own greedy decoding of the default checkpoint's base: a line of JSON."""

from __future__ import annotations

import argparse
import json
import sys
from statistics import median
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM

from mars_export.exporter.checkpoint.default import base_directory

TOKENS, ROUNDS, PROMPT = 64, 5, 90


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float16")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype if args.device == "cuda" else "float32")
    model = AutoModelForCausalLM.from_pretrained(base_directory(), dtype=dtype).to(args.device).eval()
    ids = torch.arange(5, 5 + PROMPT, device=args.device)[None]
    rates = []
    with torch.inference_mode():
        for _ in range(1 + ROUNDS):
            began = perf_counter()
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=False,
            )
            rates.append(TOKENS / (perf_counter() - began))
    figures = {
        "tokens_per_second": round(median(rates[1:]), 2),
        "dtype": str(dtype),
        "torch": torch.__version__,
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
