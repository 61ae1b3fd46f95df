"""How an answer ends: end-of-sequence, stop strings, the token budget, the context, and people who change
their mind.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
import torch
from support import tiny
from support.exports import export
from support.fixtures import Oracles, Sessions
from support.oracle import Answer, Oracle, generate

from mars_export import GenerationConfig, Session, SessionError

NEW = 24
MAIN = "a2d-qwen2"
LOOPS = {"cursor": 1, "block": 20}
CONTEXT = 32
Prompt = list[int]


def config(tau: float = 0.3, **changes: object) -> GenerationConfig:
    return GenerationConfig(tau=tau, max_new_tokens=NEW, eos_ids=()).with_values(**changes)


def answers(oracle: Oracle, cache_block: int) -> list[tuple[Prompt, Answer]]:
    prompts = [[seed, seed + 40] for seed in range(0, 200, 10)]
    return [(p, generate(oracle, p, 0.3, max_new=NEW, cache_block=cache_block)) for p in prompts]


def inside_runs(answer: Answer) -> list[int]:
    """Indices of tokens that are neither the first nor the last of the run they were accepted in."""
    ends = list(accumulate(answer.runs))
    return [
        i for end, length in zip(ends, answer.runs, strict=True) for i in range(end - length + 1, end - 1)
    ]


@pytest.mark.parametrize("loop", LOOPS)
def test_the_model_s_own_eos_is_the_default(loop: str, sessions: Sessions, oracles: Oracles) -> None:
    assert sessions(MAIN).bundle.manifest.tokens.eos == (tiny.IM_END,)
    for prompt, answer in answers(oracles(MAIN), LOOPS[loop]):
        completion = sessions(MAIN).generate(prompt, config(eos_ids=None), cache_block=LOOPS[loop])
        cut = answer.tokens.index(tiny.IM_END) + 1 if tiny.IM_END in answer.tokens else NEW
        assert list(completion.token_ids) == answer.tokens[:cut]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_stop_string_inside_a_run_cuts_tokens_and_text(
    loop: str, sessions: Sessions, oracles: Oracles
) -> None:
    session, tried = sessions(MAIN), 0
    assert session.text is not None
    for prompt, answer in answers(oracles(MAIN), LOOPS[loop]):
        for at in inside_runs(answer):
            decode = session.text.tokenizer.decode
            first, second = (decode([token]) for token in answer.tokens[at - 1 : at + 1])
            before, stop, whole = (
                decode(answer.tokens[: at - 1]),
                first + second,
                decode(answer.tokens[: at + 1]),
            )
            if not first or not second or not stop.isascii() or whole != before + stop or stop in whole[:-1]:
                continue
            completion = session.generate(prompt, config(stop=(stop,)), cache_block=LOOPS[loop])
            assert completion.text == before
            assert list(completion.token_ids) == answer.tokens[: at + 1]
            assert len(completion.confidences) == at + 1
            assert completion.finish_reason == "stop"
            tried += 1
    assert tried > 5


@pytest.fixture(scope="module")
def short_context(tmp_path_factory: pytest.TempPathFactory) -> tuple[Session, Oracle]:
    directory = tmp_path_factory.mktemp("short")
    small = tiny.Tiny("short", "qwen2", {"max_position_embeddings": CONTEXT})
    tiny.write(small, directory / "checkpoint")
    export(directory / "checkpoint", directory / "bundle", block=6, logits=False)
    return Session.open(directory / "bundle", threads=1), Oracle(
        tiny.load(small, directory / "checkpoint"), tiny.MASK, 6
    )


@pytest.mark.parametrize("tau", [1.0, 0.7, 0.2])
@pytest.mark.parametrize("cache_block", [1, 4, 7, 50])
def test_a_full_context_ends_its_row_only(
    tau: float, cache_block: int, short_context: tuple[Session, Oracle]
) -> None:
    session, oracle = short_context
    prompts = [list(range(20)), [7, 8], list(range(50, 50 + CONTEXT)), list(range(100, 131)), [9]]
    rule = {"cache_block": cache_block, "capacity": CONTEXT}
    completions = session.generate_batch(prompts, config(tau), cache_block=cache_block)
    for prompt, completion in zip(prompts, completions, strict=True):
        answer = generate(oracle, prompt, tau, max_new=NEW, **rule)
        assert list(completion.token_ids) == answer.tokens
        assert completion.finish_reason == answer.reason
        assert len(completion.token_ids) == min(NEW, CONTEXT + 1 - len(prompt))
    assert [c.finish_reason for c in completions] == ["capacity", "length", "capacity", "capacity", "length"]
    assert completions[0].text, "the text so far is kept"


def test_a_prompt_that_cannot_be_served_is_refused(short_context: tuple[Session, Oracle]) -> None:
    session = short_context[0]
    with pytest.raises(SessionError, match=r"prompt has 33 tokens.*holds 32"):
        session.generate([1] * 33)
    with pytest.raises(SessionError, match="prompt is empty"):
        session.generate([])
    with pytest.raises(SessionError, match=r"outside the vocabulary of 288: \[288, -1\]"):
        session.generate([1, 288, -1])
    with pytest.raises(SessionError, match="2 prompts but 1 configs"):
        session.generate_batch([[1], [2]], [config()])


def test_what_the_graph_lacks_is_refused_before_the_first_step(short_context: tuple[Session, Oracle]) -> None:
    session = short_context[0]
    with pytest.raises(SessionError, match="margin needs a bundle exported with --metrics"):
        session.generate([1], config(metric="margin"))
    with pytest.raises(SessionError, match="entropy needs a bundle exported with --metrics"):
        session.stream([1], config(metric="entropy"))
    for name, value in (
        ("temperature", 0.5),
        ("repetition_penalty", 1.5),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -1),
        ("logit_bias", {1: 1}),
        ("top_logprobs", 1),
    ):
        with pytest.raises(SessionError, match=f"{name} needs .* without --no-logits") as refused:
            session.generate([1], config(**{name: value}))
        assert refused.value.field == name


def test_the_mask_is_never_emitted(tmp_path: Path) -> None:
    small = tiny.Tiny("masked", "qwen2")
    model = tiny.build(small)
    with torch.no_grad():
        model.lm_head.weight[tiny.MASK] *= 20
    tiny.save(model, tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "bundle", block=6, metrics=True, logits=True)
    session = Session.open(tmp_path / "bundle", threads=1)
    oracle = Oracle(tiny.load(small, tmp_path / "checkpoint"), tiny.MASK, 6)
    would_win = 0
    for prompt in ([1, 2], [3], [40, 50, 60]):
        for metric, tau in (("probability", 0.3), ("margin", 0.2), ("entropy", 1.6)):
            answer = generate(oracle, prompt, tau, metric, NEW)
            completion = session.generate(prompt, config(tau, metric=metric))
            assert list(completion.token_ids) == answer.tokens
            assert completion.confidences == pytest.approx(answer.confidences, abs=1e-4)
            would_win += int((oracle.logits([*prompt, *answer.tokens]).argmax(-1) == tiny.MASK).sum())
        for seed in range(3):
            drawn = session.generate(prompt, config(temperature=3.0, seed=seed, repetition_penalty=1.3))
            assert tiny.MASK not in drawn.token_ids
    assert would_win > 20
