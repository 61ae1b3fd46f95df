"""A page of text: how often a graph predicts the checkpoint's next token in it, and both perplexities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...runtime.bundle.manifest import TextDrift
from ..graph.step import NEVER

TOKENS = 64  # at most, of each paragraph
PARAGRAPHS = Path(__file__).with_name("page.txt").read_text(encoding="utf-8").splitlines()
MAX_LOSS = 60.0  # nats per token; a perplexity stays a finite number


def compare(
    results: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    paragraphs: Sequence[Sequence[int]],
    mask: int | None,
) -> TextDrift | None:
    """The graph's logits [tokens, vocab] beside the checkpoint's, in which the mask is never predicted; None
    if no paragraph has three tokens.

    The prediction at a paragraph's first token is left out, as by the self-check for rounded weights.
    """
    positions = matches = 0
    losses = [0.0, 0.0]
    for found, exact, ids in zip(results, expected, paragraphs, strict=True):
        following = np.array(ids[2:], np.int64)
        found, exact = found[1:-1], exact[1:-1].copy()
        if mask is not None:
            exact[:, mask] = NEVER
        positions += len(following)
        matches += int((found.argmax(-1) == exact.argmax(-1)).sum())
        losses = [
            total + _loss(logits, following) for total, logits in zip(losses, (found, exact), strict=True)
        ]
    if not positions:
        return None
    perplexities = (math.exp(min(total / positions, MAX_LOSS)) for total in losses)
    return TextDrift(positions, matches, *perplexities)


def _loss(logits: np.ndarray, following: np.ndarray) -> float:
    """The negative log-likelihood of the tokens that follow, in nats."""
    largest = logits.max(-1)
    totals = largest + np.log(np.exp(logits - largest[:, None]).sum(-1))
    return float((totals - np.take_along_axis(logits, following[:, None], 1)[:, 0]).sum())
