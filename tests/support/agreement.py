"""Prompts and settings for the tiny checkpoints, and what it means that an answer is the oracle's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from mars_export import Commit, Completion, GenerationConfig, Session
from support.oracle import Answer, Oracle, generate

NEW = 24
PROMPTS = ([5, 17, 99], [77], list(range(30, 50)), [100, 3, 200, 41, 80, 120, 8, 9], list(range(60, 74)))
LOOPS = {
    "cursor": Commit(),
    "block-4": Commit("block", 4),
    "block-8": Commit("block", 8),
    "block-20": Commit("block", 20),
}
MAIN = "a2d-qwen2"


def cache_block_of(commit: Commit) -> int | None:
    return commit.cache_block if commit.kind == "block" else None


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
    commit: Commit = LOOPS["cursor"],
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> list[Completion]:
    """Assert that answers, alone and in a batch, are the oracle's; those alone."""
    settings, block = config(tau, metric), cache_block_of(commit)
    answers = [generate(oracle, prompt, tau, metric, NEW, cache_block=block) for prompt in prompts]
    alone = [session.generate(prompt, settings, commit=commit) for prompt in prompts]
    for made in (alone, session.generate_batch(prompts, settings, commit=commit)):
        for completion, answer in zip(made, answers, strict=True):
            agrees(completion, answer)
    return alone


def config(tau: float, metric: str = "probability", **changes: object) -> GenerationConfig:
    return GenerationConfig(tau=tau, metric=metric, max_new_tokens=NEW, eos_ids=()).with_values(**changes)
