"""Is it still the chat model it was? Compares adapters with the base model on held-out questions and
greetings.

Of each row: whether our greedy answer is the base's, and how much less log-likelihood the base's answer has
under ours than under the base. Nothing is decoded: our greedy answer is the base's where every token of it is
our likeliest.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from peft import PeftModel

sys.path.insert(0, str(Path(__file__).parents[1] / "finetune"))

import dataset
from base import load, open_base
from rows import Sequence
from streams import forward

FILES = {"questions": ("distilled.held-out.jsonl", 200), "greetings": ("greetings.base.jsonl", 50)}


def measure(model: torch.nn.Module, sequence: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token of an answer: its log-likelihood, and whether it is the likeliest."""
    pack, logits = forward(model, [(sequence, [])], 0)
    return logits.log_softmax(-1).gather(1, pack.targets[:, None])[:, 0], logits.argmax(-1) == pack.targets


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=Path, nargs="+", required=True)
    parser.add_argument("--bare", action="store_true", help="also without the default system message")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    base = open_base(None, None)
    tokenizer = base.tokenizer.backend_tokenizer
    default = dataset.turns([("system", dataset.SYSTEM)])
    system = len(tokenizer.encode(default, add_special_tokens=False).ids)
    stock = load(base, 0, False, torch.float32, "cpu").eval()
    for name, (file, count) in FILES.items():
        rows = []
        for line in (dataset.DATA / file).read_text().splitlines()[:count]:
            sequence = Sequence(*dataset.encode(tokenizer, dataset.Example(**json.loads(line))))
            rows.append((sequence, measure(stock, sequence)[0]))
        for adapter in args.adapters:
            model = PeftModel.from_pretrained(stock, adapter).eval()
            for cut in (0, system) if args.bare else (0,):
                same = likeliest = length = 0
                lost = 0.0
                for sequence, theirs in rows:
                    ours, hits = measure(
                        model, replace(sequence, tokens=sequence.tokens[cut:], start=sequence.start - cut)
                    )
                    same += bool(hits.all())
                    likeliest += int(hits.sum())
                    length += len(hits)
                    lost += float((theirs - ours).sum())
                print(
                    f"{adapter} {name}{' bare' * bool(cut)}: same answer {same} of {len(rows)},"
                    f" same next token {100 * likeliest / length:.1f} % of {length},"
                    f" log-likelihood lost {lost / length:.3f} nats a token,"
                    f" {lost / len(rows):.2f} an answer",
                    flush=True,
                )
            stock = model.unload()


if __name__ == "__main__":
    main()
