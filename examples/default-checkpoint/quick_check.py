"""Simulates MARS decoding of held-out rows along their references: exact match and tokens per forward at
several tau.

One forward holds a window of masks at every response position, so every tau is read off the same
probabilities. A row is right when every token it accepts is the reference's; this is greedy decoding's exact
match, and a lower bound of a final number's accuracy. Rows that leave the reference count as wrong and stop
there.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import dataset
import torch
from model import WINDOW, TwoStream, lay_out
from tokenizers import Tokenizer

TAUS = (1.0, 0.99, 0.95, 0.9, 0.8, 0.7)


@dataclass(slots=True)
class Tally:
    """Rows right, tokens accepted and forwards spent at one tau."""

    right: int = 0
    tokens: int = 0
    forwards: int = 0


def follow(right: torch.Tensor, sure: torch.Tensor, tau: float) -> tuple[bool, int, int]:
    """Follows the acceptance rule. right, sure: [start, depth], depth 0 the ordinary prediction. (all right,
    tokens, forwards)"""
    at = forwards = 0
    while at < len(right):
        forwards += 1
        for depth in range(min(WINDOW + 1, len(right) - at)):
            if depth and (tau >= 1 or sure[at, depth] < tau):
                break
            if not right[at, depth]:
                return False, at + depth, forwards
            taken = depth + 1
        at += taken
    return True, at, forwards


@torch.inference_mode()
def tables(
    model: TwoStream, tokens: list[int], prompt: int, one_token: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether the prediction is the reference's and its probability, for every window start and depth."""
    length = len(tokens) - prompt
    spans = (
        []
        if one_token
        else [(start, min(start + WINDOW, len(tokens) - 1)) for start in range(prompt, len(tokens) - 1)]
    )
    sequence = lay_out(tokens, prompt, spans)
    logits = model([sequence])
    sure, guess = (logits - logits.logsumexp(-1, keepdim=True)).exp().max(-1)
    hit = guess == sequence.targets
    right, confidence = torch.zeros(length, WINDOW + 1, dtype=torch.bool), torch.zeros(length, WINDOW + 1)
    right[:, 0], confidence[:, 0] = hit[:length], sure[:length]
    row = length
    for index, (start, stop) in enumerate(spans):
        right[index, 1 : 1 + stop - start], confidence[index, 1 : 1 + stop - start] = (
            hit[row : row + stop - start],
            sure[row : row + stop - start],
        )
        row += stop - start
    return right, confidence


def check(
    model: TwoStream, tokenizer: Tokenizer, task: str, count: int, one_token: bool
) -> dict[float, Tally]:
    """Tallies by tau over the first calibration rows of a task."""
    tallies = {tau: Tally() for tau in (TAUS[:1] if one_token else TAUS)}
    for example in dataset.held_out_rows(task)["calibration"][:count]:
        right, sure = tables(model, *dataset.encode(tokenizer, example), one_token)
        for tau, tally in tallies.items():
            good, tokens, forwards = follow(right, sure, tau)
            tally.right, tally.tokens, tally.forwards = (
                tally.right + good,
                tally.tokens + tokens,
                tally.forwards + forwards,
            )
        if not bool(right[:, 0].all()):
            wrong = int((~right[:, 0]).nonzero()[0, 0])
            answer = tokenizer.encode(example.answer, add_special_tokens=False)
            at = answer.offsets[wrong][0] if wrong < len(answer.ids) else len(example.answer)
            print(
                "   miss:",
                example.messages[-1][1],
                "|",
                example.answer[:at],
                "<<",
                example.answer[at:],
                flush=True,
            )
    return tallies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--tasks", nargs="+", default=["assistant", "arithmetic"])
    parser.add_argument("--one-token", action="store_true", help="tau 1 only: much cheaper")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = TwoStream(args.base)
    state = torch.load(args.checkpoint, weights_only=True)
    model.load_state_dict(state["model"])
    tokenizer = Tokenizer.from_file(str(args.base / "tokenizer.json"))
    print(f"step {state['step']} tokens {state['tokens']} seconds {state['seconds']:.0f}")
    for task in args.tasks:
        began = time.time()
        for tau, tally in check(model, tokenizer, task, args.rows, args.one_token).items():
            print(
                f"{task} tau {tau}: right {tally.right}/{args.rows},"
                f" {tally.tokens / tally.forwards:.2f} tokens/forward"
            )
        print(f"{time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
