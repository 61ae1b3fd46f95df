"""The most masks of a step, and the tokens that a number of masks gives."""

from __future__ import annotations

import random
from functools import cache

import pytest
from support.chaos import BLOCK, chaotic
from support.fake import MASK, FakeBackend
from support.loops import decode

from mars_export import GenerationConfig
from mars_export.runtime.decode.sequence import Sequence


@pytest.mark.parametrize("most", [0, 1, 2, None])
def test_no_step_has_more_masks_than_the_bundle_says(most: int | None) -> None:
    backend = FakeBackend(chaotic)
    seq = Sequence(0, [4, 1, 1], GenerationConfig(max_new_tokens=30, masks="full"), (), mask_limit=most)
    list(decode(backend, [seq], BLOCK, MASK))
    masks = [int((step.input_ids == MASK).sum()) for step in backend.steps]
    assert max(masks) == (BLOCK + 1 if most is None else most)


PROMPTS, NEW = 16, 500


@pytest.mark.parametrize(("chance", "masks"), [(0.6, 3), (0.8, 3), (0.9, 3), (0.8, 7), (0.95, 7)])
def test_one_forward_makes_the_tokens_of_the_formula_and_more_than_two_do(chance: float, masks: int) -> None:
    """A step verifies and drafts. With A drafts expected to hold and all of them with chance f, it makes
    (2 + A - f) / (2 - f) tokens a forward; drafting and verifying in turn makes (2 + A) / 2.
    """

    @cache
    def holds(first: int, position: int) -> int:
        """How many drafts hold that follow this many known tokens, in the sequence whose prompt is
        `first`.
        """
        draw = random.Random(f"{first} {position}")
        return next((i for i in range(masks) if draw.random() >= chance), masks)

    def predict(known: tuple[int, ...], num: int) -> tuple[int, float]:
        wrong = num > holds(known[0], len(known))
        return (99 if wrong else 1 + (len(known) + num) % 90), 0.9

    config = GenerationConfig(max_new_tokens=NEW, masks=masks)
    one = [Sequence(i, [i + 1], config, ()) for i in range(PROMPTS)]
    list(decode(FakeBackend(predict), one, masks, MASK))
    tokens = two_forwards = 0
    for seq in one:
        position = 1
        while position < 1 + NEW:
            gained = 2 + holds(seq.index + 1, position)
            position, tokens, two_forwards = position + gained, tokens + gained, two_forwards + 2
    held = sum(chance**i for i in range(1, masks + 1))
    measured = PROMPTS * NEW / sum(seq.stats.forwards for seq in one)
    assert measured == pytest.approx((2 + held - chance**masks) / (2 - chance**masks), rel=0.05)
    assert tokens / two_forwards == pytest.approx((2 + held) / 2, rel=0.05)
    assert measured > tokens / two_forwards
