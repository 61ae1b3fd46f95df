"""Prompts and settings for the tiny checkpoints, and what it means that an answer is the oracle's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from mars_export import Completion, GenerationConfig, Session
from support.oracle import Answer, Oracle, generate

NEW = 24
PROMPTS = ([5, 17, 99], [77], list(range(30, 50)), [100, 3, 200, 41, 80, 120, 8, 9], list(range(60, 74)))
LOOPS = {"cursor": 1, "block-4": 4, "block-8": 8, "block-20": 20}
MAIN = "a2d-qwen2"


def agrees(completion: Completion, answer: Answer) -> None:
    assert list(completion.token_ids) == answer.tokens
    assert completion.finish_reason == answer.reason
    assert completion.confidences == pytest.approx(answer.confidences, abs=1e-4)
    assert completion.stats.tokens == len(answer.tokens)
    assert completion.stats.accepted == Counter(answer.runs)


def follow(
    session: Session,
    oracle: Oracle,
    tau: float,
    metric: str = "probability",
    cache_block: int = 1,
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> list[Completion]:
    """Assert that answers, alone and in a batch, are the oracle's; those alone."""
    settings = config(tau, metric)
    answers = [generate(oracle, prompt, tau, metric, NEW, cache_block=cache_block) for prompt in prompts]
    alone = [session.generate(prompt, settings, cache_block=cache_block) for prompt in prompts]
    for made in (alone, session.generate_batch(prompts, settings, cache_block=cache_block)):
        for completion, answer in zip(made, answers, strict=True):
            agrees(completion, answer)
    return alone


def config(tau: float, metric: str = "probability", **changes: object) -> GenerationConfig:
    return GenerationConfig(tau=tau, metric=metric, max_new_tokens=NEW, eos_ids=()).with_values(**changes)
