"""Is it still the chat model it was? Compares adapters with the base model on held-out questions and
greetings.

Of each row: whether our greedy answer is the base's, and how much less log-likelihood the base's answer has
under ours than under the base. Nothing is decoded: our greedy answer is the base's where every token of it is
our likeliest.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import dataset
import export_adapter
import torch
from model import TwoStream, lay_out
from tokenizers import Tokenizer

FILES = {"questions": ("distilled.held-out.jsonl", 200), "greetings": ("greetings.base.jsonl", 50)}


def measure(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token of an answer: its log-likelihood, and whether it is the likeliest."""
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0], logits.argmax(-1) == targets


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, nargs="+", required=True)
    parser.add_argument("--bare", action="store_true", help="also without the default system message")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = TwoStream(args.base)
    everything = torch.arange(len(model.embedding))
    tokenizer = Tokenizer.from_file(str(args.base / "tokenizer.json"))
    default = dataset.turns([("system", dataset.SYSTEM)])
    system = len(tokenizer.encode(default, add_special_tokens=False).ids)
    for name, (file, count) in FILES.items():
        rows = []
        for line in (dataset.DATA / file).read_text().splitlines()[:count]:
            tokens, prompt = dataset.encode(tokenizer, dataset.Example(**json.loads(line)))
            targets = torch.tensor(tokens[prompt:])
            theirs, _ = measure(model.base([lay_out(tokens, prompt, [])], everything), targets)
            rows.append((tokens, prompt, targets, theirs))
        for adapter in args.adapters:
            export_adapter.read(model, adapter)
            for cut in (0, system) if args.bare else (0,):
                same = likeliest = length = 0
                lost = 0.0
                for tokens, prompt, targets, theirs in rows:
                    logits = model([lay_out(tokens[cut:], prompt - cut, [])], everything)
                    ours, hits = measure(logits, targets)
                    same += bool(hits.all())
                    likeliest += int(hits.sum())
                    length += len(targets)
                    lost += float((theirs - ours).sum())
                print(
                    f"{adapter} {name}{' bare' * bool(cut)}: same answer {same} of {len(rows)},"
                    f" same next token {100 * likeliest / length:.1f} % of {length},"
                    f" log-likelihood lost {lost / length:.3f} nats a token,"
                    f" {lost / len(rows):.2f} an answer",
                    flush=True,
                )


if __name__ == "__main__":
    main()
