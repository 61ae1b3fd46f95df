"""Token for token, both cache loops against the plain sampler of oracle.py."""

from __future__ import annotations

import pytest
import torch
import transformers
from support import tiny
from support.agreement import LOOPS, MAIN, NEW, PROMPTS, config, follow
from support.fixtures import Oracles, Sessions
from support.oracle import generate

from mars_export.runtime.accept import METRICS

TAUS = {"probability": (1.0, 0.9, 0.3), "margin": (0.9, 0.3), "entropy": (0.0, 0.3, 1.6)}
SETTINGS = [(metric, tau) for metric in METRICS for tau in TAUS[metric]]
OTHERS = [name for name in tiny.TINIES if name != MAIN]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("metric", "tau"), SETTINGS)
def test_every_tau_metric_and_loop_alone_and_in_a_ragged_batch(
    metric: str, tau: float, loop: str, sessions: Sessions, oracles: Oracles
) -> None:
    follow(sessions(MAIN), oracles(MAIN), tau, metric, LOOPS[loop])


@pytest.mark.parametrize("name", OTHERS)
def test_every_family(name: str, sessions: Sessions, oracles: Oracles) -> None:
    follow(sessions(name), oracles(name), 0.5)


@pytest.mark.parametrize("loop", ["cursor", "block-8"])
@pytest.mark.parametrize("name", [MAIN, "mistral", "qwen3-mixed"])
def test_prompts_longer_than_a_chunk_and_answers_longer_than_a_bucket(
    name: str, loop: str, sessions: Sessions, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mars_export.runtime.decode.limits.PREFILL_CHUNK", 7)
    monkeypatch.setattr("mars_export.runtime.decode.backend.GROWTH", 8)
    prompts = [list(range(40, 40 + length)) for length in (6, 7, 8, 14, 15, 50)]
    alone = follow(sessions(name), oracles(name), 0.6, cache_block=LOOPS[loop], prompts=prompts)
    assert [done.stats.prefill_forwards for done in alone] == [(len(prompt) - 1) // 7 for prompt in prompts]


def test_the_matrix_has_runs_and_rejections(oracles: Oracles) -> None:
    """Nothing above would mean much if all or nothing was accepted."""
    for metric in METRICS:
        lengths = set()
        for tau in TAUS[metric][1:]:
            answers = [generate(oracles(MAIN), p, tau, metric, NEW) for p in PROMPTS]
            lengths |= {run for answer in answers for run in answer.runs}
            assert any(run > 1 for answer in answers for run in answer.runs), (metric, tau)
            assert sum(answer.rejections for answer in answers) > 1, (metric, tau)
        assert lengths == {1, 2, 3, 4, 5, 6}, metric


@pytest.mark.parametrize("loop", ["cursor", "block-8"])
@pytest.mark.parametrize("name", [MAIN, "llama", "mistral", "qwen3"])
def test_tau_1_is_greedy_generation_of_transformers(
    name: str, loop: str, sessions: Sessions, oracles: Oracles
) -> None:
    model = oracles(name).model
    settings = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, suppress_tokens=[tiny.MASK]
    )
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)[
            0, len(prompt) :
        ].tolist()
        got = sessions(name).generate(prompt, config(1.0), cache_block=LOOPS[loop])
        assert list(got.token_ids) == expected
        assert got.stats.forwards == NEW, "one-token mode: one forward a token"
        assert got.stats.accepted == {1: NEW}
