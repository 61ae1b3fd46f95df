"""Answers of libmars against those of Python on tiny bundles, token for token: tau, sampling, masks,
batches, and requests that cannot be served."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
from support import tiny
from support.cabi import Library
from support.cabi_session import CSession
from support.fixtures import Named, Sessions
from support.twins import PROMPT, SAMPLINGS

from mars_export import GenerationConfig

TAUS = (1.0, 0.7, 0.4, 0.0)


@pytest.mark.parametrize(("cache_block", "tau"), list(product((1, 7), TAUS)))
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_tokens_are_those_of_python(
    cache_block: int, tau: float, sampling: dict[str, Any], twin: CSession, sessions: Sessions
) -> None:
    for metric, prompt in product(("probability", "margin", "entropy"), (PROMPT, list(range(1, 40)))):
        asked = {"tau": tau, "metric": metric, "max_new_tokens": 24, "eos_ids": (), **sampling}
        wanted = sessions("llama").generate(prompt, GenerationConfig(**asked), cache_block=cache_block)
        made = twin.generate(prompt, cache_block=cache_block, **asked)
        assert made.token_ids == wanted.token_ids
        assert made.finish_reason == wanted.finish_reason
        assert made.confidences == pytest.approx(wanted.confidences, abs=1e-5)
        assert (made.forwards, made.prefill_forwards) == (
            wanted.stats.forwards,
            wanted.stats.prefill_forwards,
        )
        assert {k: n for k, n in enumerate(made.accepted) if n} == wanted.stats.accepted


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3-mixed"])
def test_long_prompts_and_full_contexts(
    name: str, library: Library, bundles: Named, sessions: Sessions
) -> None:
    draw = random.Random(name)
    with CSession(library, bundles(name), threads=1) as twin:
        for length, cache_block in product((255, 257, 505, 512), (1, 32)):
            prompt = [draw.randrange(tiny.NUM_BYTES) for _ in range(length)]
            wanted = sessions(name).generate(
                prompt, GenerationConfig(tau=0.3, max_new_tokens=20, eos_ids=()), cache_block=cache_block
            )
            made = twin.generate(prompt, cache_block=cache_block, tau=0.3, max_new_tokens=20, eos_ids=())
            assert (made.token_ids, made.finish_reason) == (wanted.token_ids, wanted.finish_reason)
            assert (made.forwards, made.prefill_forwards) == (
                wanted.stats.forwards,
                wanted.stats.prefill_forwards,
            )


@pytest.mark.parametrize("cache_block", [1, 32])
def test_rows_of_one_batch(cache_block: int, twin: CSession, sessions: Sessions) -> None:
    prompts = [PROMPT, [i % 250 for i in range(290)], [7], [8] * 30]
    settings = [
        {"tau": t, "max_new_tokens": n, "temperature": h, "eos_ids": ()}
        for t, n, h in ((0.4, 30, 0), (1, 9, 0), (0, 50, 1), (0.6, 1, 0))
    ]
    wanted = sessions("llama").generate_batch(
        prompts, [GenerationConfig(**s) for s in settings], cache_block=cache_block
    )  # type: ignore[arg-type]
    made = twin.generate_batch(prompts, [{**s, "cache_block": cache_block} for s in settings])
    assert [m.token_ids for m in made] == [w.token_ids for w in wanted]
    assert [m.finish_reason for m in made] == [w.finish_reason for w in wanted]
