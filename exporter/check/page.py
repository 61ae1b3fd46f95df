"""A page of text: how often a graph predicts the checkpoint's next token in it, and both perplexities."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...runtime.bundle.manifest import TextDrift
from ..graph.step import NEVER

TOKENS = 64  # at most, of each paragraph
PARAGRAPHS = (
    "The old bridge had carried carts and cattle across the river for three hundred years before the"
    " first car drove over it. In spring the water rose to its arches and brought down branches from the"
    " hills, and every summer the village repaired the stones that the winter had loosened. Nobody"
    " remembered who had built it, but everybody knew where to stand to see the fish.",
    "Bread needs little more than flour, water, salt and time. Mix them until no dry flour is left,"
    " cover the bowl and wait until the dough has doubled. Fold it, shape it into a loaf, and let it"
    " rest again while the oven becomes hot. After forty minutes the crust is dark and sounds hollow"
    " when you knock on it; leave it to cool before you cut it.",
    "A battery stores energy in chemical form. When it is connected to a lamp, electrons move from the"
    " negative to the positive side through the wire, and ions move through the liquid between them."
    " When one of the two materials is used up, the battery is empty. Charging it reverses the reaction,"
    " but a little of the material is lost each time.",
    "Dear Anna, thank you for your letter and for the photographs. We arrived on Tuesday, a day late,"
    " because the train from the coast was cancelled. The children have already found the lake and"
    " refuse to leave it. If the weather stays as it is, we will be back at the end of the month. Please"
    " water the plants in the kitchen, and say hello to your mother.",
)
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
