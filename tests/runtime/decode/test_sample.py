"""Sampling: draws depend on seed and position only, filters are what they say, and the penalty is
transformers' own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import plain, tiny
from support.fixtures import Sessions
from support.oracle import Oracle
from support.plain import sorted_whole
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mars_export import GenerationConfig, SessionError
from mars_export.runtime.accept import verify
from mars_export.runtime.decode.sample import Penalties, SampledTokens, choose, uniform

MAIN = "a2d-qwen2"
PROMPT = [5, 17, 99]


def config(tau: float = 0.5, **changes: object) -> GenerationConfig:
    return GenerationConfig(tau=tau, max_new_tokens=20, eos_ids=()).with_values(**changes)


def logits(seed: int, size: int = 50) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)


def test_a_sampled_candidate_is_judged_by_its_own_probability(
    sessions: Sessions, oracles: Callable[[str], Oracle]
) -> None:
    completion = sessions(MAIN).generate(PROMPT, config(1.0, temperature=2.0, seed=5))
    known = list(PROMPT)
    for token, confidence in zip(completion.token_ids, completion.confidences, strict=True):
        row = oracles(MAIN).logits(known)[-1].clone()
        row[tiny.MASK] = -torch.inf
        assert confidence == pytest.approx(float(torch.softmax(row, -1)[token]), abs=1e-4)
        known.append(token)


@pytest.mark.parametrize("penalty", [0.7, 1.3, 2.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    seen = [3, 3, 17, 40, 8]
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    for seed in range(20):
        values = logits(seed)
        expected = processor(torch.tensor([seen]), torch.from_numpy(values)[None].clone())[0]
        settings = config(repetition_penalty=penalty)
        token, confidence = choose(values, settings, Penalties(settings).follow(seen), 7)
        assert token == int(expected.argmax())
        assert confidence == pytest.approx(float(torch.softmax(expected, -1).max()), abs=1e-6)


LEAST, MOST = 5e-324, 1.7976931348623157e308


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("metric", ["probability", "margin", "entropy"])
@pytest.mark.parametrize("penalty", [LEAST, 1e-300, 0.5, 1.0, 1e39, MOST])
@pytest.mark.parametrize("temperature", [0.0, LEAST, 1e-300, 1.0, MOST])
def test_no_setting_that_is_allowed_makes_no_number(temperature: float, penalty: float, metric: str) -> None:
    """Found by fuzzing the C interface: 0 / 0, and a confidence that JSON cannot write."""
    values = np.array([3, 0, -1, -1e9, 2], np.float32)
    settings = config(
        temperature=temperature, repetition_penalty=penalty, metric=metric, min_p=0.1, top_p=0.9
    )
    token, confidence = choose(values, settings, Penalties(settings).follow([0, 1, 2, 3]), 7)
    assert math.isfinite(confidence)
    if 0 < temperature < 1:  # as good as greedy
        assert token == (4 if penalty > 1 else 0)


@pytest.mark.parametrize("cache_block", [1, 8])
def test_penalties_of_a_model_are_those_of_a_plain_loop(
    cache_block: int, sessions: Sessions, oracles: Callable[[str], Oracle]
) -> None:
    penalties: dict[str, Any] = {
        "repetition_penalty": 1.2, "presence_penalty": 0.8, "frequency_penalty": 0.6,
        "logit_bias": {PROMPT[0]: 1.5, 40: -100, 41: 2.5}, "top_logprobs": 3,
    }  # fmt: skip
    for prompt in (PROMPT, [1], list(range(20))):
        settings = config(1.0, **penalties)
        answer: list[int] = []
        tops: list[list[int]] = []
        while len(answer) < settings.max_new_tokens:
            row = oracles(MAIN).logits([*prompt, *answer])[-1].numpy().copy()
            row[tiny.MASK] = -1e9
            values = plain.penalized(row, settings, prompt, answer)
            tops.append([token for token, _ in plain.top(values, 3)])
            answer.append(plain.pick(values, settings, len(prompt) + len(answer)))
        made = [sessions(MAIN).generate(prompt, settings, cache_block=cache_block)]
        if cache_block == 1:
            made.append(sessions(MAIN).generate(prompt, settings.with_values(exact=True)))
        for completion in made:
            assert list(completion.token_ids) == answer
            assert [[token for token, _ in top] for top in completion.top_logprobs] == tops


@pytest.mark.parametrize("tau", [None, 0.3])
def test_asking_for_likely_tokens_changes_nothing(tau: float | None, sessions: Sessions) -> None:
    settings = GenerationConfig(tau=tau, max_new_tokens=20, eos_ids=(), masks="full")
    without = sessions(MAIN).generate(PROMPT, settings)
    completion = sessions(MAIN).generate(
        PROMPT, settings.with_values(top_logprobs=2, tau=tau, exact=tau is None)
    )
    assert (completion.token_ids, completion.confidences) == (without.token_ids, without.confidences)
    for token, confidence, top in zip(
        completion.token_ids, completion.confidences, completion.top_logprobs, strict=True
    ):
        assert top[0] == (token, pytest.approx(math.log(confidence), abs=1e-5)) and top[1][1] <= top[0][1]


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature", "min_p"),
    [
        (0, 1.0, 1.0, 0.0),
        (5, 1.0, 0.7, 0.0),
        (0, 0.8, 1.3, 0.0),
        (10, 0.6, 1.0, 0.0),
        (3, 0.99, 2.0, 0.0),
        (0, 1.0, 1.5, 0.2),
        (6, 1.0, 2.0, 0.05),
        (0, 1.0, 1.0, 1.0),
    ],
)
def test_draws_follow_the_distribution_of_transformers_warpers(
    top_k: int, top_p: float, temperature: float, min_p: float
) -> None:
    values = logits(4, 30)
    scores = TemperatureLogitsWarper(temperature)(None, torch.from_numpy(values)[None].clone())
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    expected = torch.softmax(scores.double(), -1)[0].numpy()
    settings = config(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=1)
    draws = [choose(values, settings, Penalties(settings), position)[0] for position in range(4000)]
    found = np.bincount(draws, minlength=30) / len(draws)
    assert set(draws) <= set(np.flatnonzero(expected))
    assert np.abs(found - expected).max() < 4 * math.sqrt(0.25 / len(draws))


@pytest.mark.parametrize("top_k", [0, 1, 7, 2999, 5000])
@pytest.mark.parametrize(("top_p", "min_p"), [(1.0, 0.0), (0.9, 0.0), (1.0, 0.02), (0.5, 0.3)])
def test_a_draw_is_that_of_the_whole_sorted_vocabulary(top_k: int, top_p: float, min_p: float) -> None:
    for seed in range(40):
        values = logits(seed, 3000).round(1)  # many are equal
        allowed = logits(seed + 1000, 3000) > (-9, 2, 7)[seed % 3]
        settings = config(
            temperature=(0.3, 1.0, 3.0, 30.0)[seed % 4], top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
        )
        expected = sorted_whole(np.where(allowed, values, -np.inf), settings, uniform(seed, 7))
        assert choose(values, settings, Penalties(settings), 7, allowed)[0] == expected


def test_nothing_is_drawn_behind_a_draft_token_that_did_not_hold() -> None:
    class Rows(list[np.ndarray]):
        def __getitem__(self, index: Any) -> Any:
            assert index < 3, "nobody asks for this one"
            return super().__getitem__(index)

    settings = config(temperature=1.0)
    rows: Any = Rows(logits(i) for i in range(10))
    drawn = SampledTokens(rows, settings, Penalties(settings), len(PROMPT))
    draft_tokens = [*drawn[:2], 99, 99]
    assert verify(drawn, draft_tokens, (), 9) == 3
    assert len(drawn.confidences(3)) == 3


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("values", [{"temperature": 0.0}, {"min_p": 0.05}, {"top_k": 3}, {"top_p": 0.5}, {}])
def test_logits_that_are_not_numbers_are_refused(values: dict[str, Any], wrong: float) -> None:
    """The cases of libmars's sample_test.cpp."""
    settings = config(**({"temperature": 1.0} | values))
    for place in range(20):
        row = np.ones(20, np.float32)
        row[7], row[place] = 9, wrong
        with pytest.raises(SessionError, match="logits are not numbers") as caught:
            choose(row, settings, Penalties(settings), 3)
        assert caught.value.code == "failed"
        with pytest.raises(SessionError, match="logits are not numbers"):
            SampledTokens(row[None], settings, Penalties(settings), 3)[0]
        row[place] = -math.inf  # a token that cannot be
        assert choose(row, settings, Penalties(settings), 3)[0] != place
