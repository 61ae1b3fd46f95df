"""Accuracy and tokens per forward on held-out answers, from windows of masks at every place of an answer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from model import forward
from rows import Sequence
from torch import Tensor

TAU = 0.95
WINDOWS = 32  # of one forward


@torch.no_grad()
def tables(model: Any, sequence: Sequence, mask_id: int, width: int) -> tuple[Tensor, Tensor]:
    """Whether a prediction is the reference's token, and its probability: [place, depth]. Depth 0 is the
    ordinary prediction of the place's token, depth d that of the d-th token after it, at the d-th mask."""
    start, last = sequence.start, len(sequence.tokens) - 1
    right = torch.zeros(last + 1 - start, width + 1, dtype=torch.bool)
    sure = torch.zeros(last + 1 - start, width + 1)
    spans = [(p, min(p + width, last)) for p in range(start, last)] if width else []
    for first in range(0, max(1, len(spans)), WINDOWS):
        part = spans[first : first + WINDOWS]
        pack, logits = forward(model, [(sequence, part)], mask_id)
        logits[:, mask_id] = -torch.inf  # never predicted
        probability, guess = logits.softmax(-1).max(-1)
        cells = [(p, 0) for p in range(len(right))]
        cells += [(p - start, depth) for p, end in part for depth in range(1, end - p + 1)]
        rows, depths = torch.tensor(cells).T
        right[rows, depths] = (guess == pack.targets).cpu()
        sure[rows, depths] = probability.cpu()
    return right, sure


def follow(right: Tensor, sure: Tensor) -> tuple[bool, int, int]:
    """Decodes at tau along the reference, to the first wrong token: all right, tokens, forwards."""
    taken = sure >= TAU
    taken[:, 0] = True
    at = forwards = 0
    while at < len(right):
        count, good = (int(row[at].cumprod(0).sum()) for row in (taken, right))
        forwards += 1
        if good < count:
            return False, at + good + 1, forwards
        at += count
    return True, at, forwards


def exact(right: Tensor) -> tuple[int, int]:
    """Decodes in exact mode along the reference, to the first wrong ordinary prediction: tokens, forwards.
    A step accepts its right draft tokens and one more. If all are right, its masks give the next ones."""
    length = int(right[:, 0].cumprod(0).sum())
    known = forwards = min(1, length)
    start: int | None = 0  # the window that the draft tokens come from knows the tokens before this place
    while known < length:
        good = 0 if start is None else int(right[start, 1:].cumprod(0).sum())
        start = known + good if start is None or good == right.shape[1] - 1 else None
        known, forwards = known + good + 1, forwards + 1
    return min(known, length), forwards


def score(model: Any, sequences: list[Sequence], mask_id: int, width: int) -> dict[str, float]:
    """The figures of the table, with `width` masks a forward; 0 for one token only."""
    total: Counter[str] = Counter()
    model.eval()
    for sequence in sequences:
        right, sure = tables(model, sequence, mask_id, width)
        (good, tokens, forwards), (sure_tokens, steps) = follow(right, sure), exact(right)
        total.update(right=int(right[:, 0].all()), good=int(good), tokens=tokens)
        total.update(forwards=forwards, exact_tokens=sure_tokens, exact_forwards=steps)
    return {
        "accuracy, one token, %": 100 * total["right"] / len(sequences),
        f"accuracy, tau {TAU}, %": 100 * total["good"] / len(sequences),
        f"tokens per forward, tau {TAU}": total["tokens"] / total["forwards"],
        "tokens per forward, exact mode": (total["exact_tokens"] or 1) / (total["exact_forwards"] or 1),
    }
