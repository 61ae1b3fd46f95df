"""What clients of OpenAI's find: the openai package against a real server on a tiny bundle."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from support.missing import need
from support.stalling import Paced, paced

need("uvicorn", "serve")
need("openai", "dev")

import openai  # noqa: E402
from support.served import HELLO, Serving, chat, serving, until  # noqa: E402

from mars_export import GenerationConfig, Session  # noqa: E402


def fresh(session: Session) -> Session:
    """One that has learned nothing of how often its draft tokens hold: the same requests take the same
    steps.
    """
    return Session(session.bundle, session.variant, session.backend, session.text)


@pytest.fixture
def anew(session: Session) -> Iterator[openai.OpenAI]:
    """A client of a server that has answered nothing yet."""
    with (
        serving({"tiny": fresh(session)}) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=30) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def server(session: Session) -> Iterator[Serving]:
    with serving({"tiny": session, "twin": session}) as running:
        yield running


def test_an_answer_is_the_sessions_own(anew: openai.OpenAI, session: Session) -> None:
    alone = fresh(session).generate(HELLO, GenerationConfig(max_new_tokens=12))
    answer = chat(anew)
    assert answer.choices[0].message.content == alone.text
    assert answer.usage.prompt_tokens == alone.stats.prompt_tokens
    assert answer.usage.completion_tokens == alone.stats.tokens == 12
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == alone.stats.accepted_draft_tokens > 0
    assert details.rejected_prediction_tokens == alone.stats.rejected_draft_tokens
    assert answer.timings["forwards"] == alone.stats.forwards


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    fast = {"tau": 0.3, "masks": "full"}
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, extra_body=fast))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == chat(client, extra_body=fast).choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert len({c.id for c in chunks}) == 1
    assert all(c.usage is None for c in chunks[:-1])
    assert len(chunks) - 3 < 12, "several tokens came in one chunk"


@pytest.mark.parametrize("setting", [{}, {"tau": 0.3, "masks": "full"}])
def test_steps_are_what_the_decoder_did(
    setting: dict[str, Any], anew: openai.OpenAI, session: Session
) -> None:
    alone = fresh(session).stream(HELLO, GenerationConfig(max_new_tokens=12, **setting))
    events = [event for event in alone if event.token_ids]
    answer = chat(anew, extra_body={"return_steps": True, **setting})
    steps = answer.choices[0].steps
    assert [[t["id"] for t in step["tokens"]] for step in steps] == [list(e.token_ids) for e in events]
    hows = [[t["how"] for t in step["tokens"]] for step in steps]
    proposed = "accepted" if setting else "verified"
    assert all(how == [*[proposed] * (len(how) - 1), "accepted"] for how in hows), hows
    assert any(len(how) > 1 for how in hows)
    assert "".join(t["text"] for step in steps for t in step["tokens"]) == answer.choices[0].message.content
    assert answer.mars["tau"] == setting.get("tau") and answer.mars["exact"] is not bool(setting)


def test_steps_spell_what_a_stop_string_leaves(client: openai.OpenAI) -> None:
    whole = chat(client, max_tokens=40).choices[0].message.content
    stop = whole[9:12]
    for stream in (False, True):
        answer = chat(client, max_tokens=40, stop=[stop], stream=stream, extra_body={"return_steps": True})
        if stream:
            choices = [chunk.choices[0] for chunk in answer]
            text = "".join(choice.delta.content or "" for choice in choices)
            steps = [step for choice in choices for step in choice.steps]
            reason = choices[-1].finish_reason
        else:
            [choice] = answer.choices
            text, steps, reason = choice.message.content, choice.steps, choice.finish_reason
        assert text == whole[: whole.index(stop)] and reason == "stop"
        assert "".join(t["text"] for step in steps for t in step["tokens"]) == text


close_to = partial(pytest.approx, rel=1e-5)
"""Steps of other widths, which the planner chooses by time, have other last bits."""


def test_log_probabilities(client: openai.OpenAI, session: Session) -> None:
    alone = session.generate(HELLO, GenerationConfig(max_new_tokens=6))
    content = chat(client, max_tokens=6, logprobs=True).choices[0].logprobs.content
    assert [t.logprob for t in content] == close_to([math.log(p) for p in alone.confidences])
    assert "".join(t.token for t in content) == alone.text
    spelled = b"".join(bytes(t.bytes) for t in content)
    assert spelled.decode() == alone.text
    streamed = [c.choices[0].logprobs for c in chat(client, max_tokens=6, logprobs=True, stream=True)]
    logprobs = [t.logprob for part in streamed if part for t in part.content]
    assert logprobs == close_to([t.logprob for t in content])
    older = client.completions.create(model="tiny", prompt="hi", max_tokens=5, logprobs=1)
    assert len(older.choices[0].logprobs.tokens) == 5
    assert "".join(older.choices[0].logprobs.tokens) == older.choices[0].text
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs: true"):
        chat(client, top_logprobs=3)


def test_likely_tokens(client: openai.OpenAI, session: Session) -> None:
    alone = session.generate(HELLO, GenerationConfig(max_new_tokens=6, top_logprobs=3))
    answer = chat(client, max_tokens=6, logprobs=True, top_logprobs=3).choices[0]
    assert answer.message.content == alone.text
    for token, top in zip(answer.logprobs.content, alone.top_logprobs, strict=True):
        assert [t.logprob for t in token.top_logprobs] == close_to([p for _, p in top])
        assert (token.top_logprobs[0].token, token.top_logprobs[0].bytes) == (token.token, token.bytes)
    streamed = chat(client, max_tokens=6, logprobs=True, top_logprobs=3, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    tokens = [token for part in parts if part for token in part.content]
    for token, other in zip(tokens, answer.logprobs.content, strict=True):
        assert [t.token for t in token.top_logprobs] == [t.token for t in other.top_logprobs]
        logprobs = [t.logprob for t in token.top_logprobs]
        assert logprobs == close_to([t.logprob for t in other.top_logprobs])
    older = client.completions.create(model="tiny", prompt="hi", max_tokens=5, logprobs=4, temperature=2)
    for token, top in zip(
        older.choices[0].logprobs.tokens, older.choices[0].logprobs.top_logprobs, strict=True
    ):
        likely = list(top.values())[:4]
        assert token in top and likely == sorted(likely, reverse=True)


def test_biases_and_penalties(client: openai.OpenAI, session: Session) -> None:
    text = session.text
    assert text is not None
    first, *_ = session.generate(HELLO, GenerationConfig(max_new_tokens=1)).token_ids
    asked = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {str(first): -100}}
    settings = GenerationConfig(
        max_new_tokens=12, presence_penalty=1.5, frequency_penalty=0.5, logit_bias={first: -100}
    )
    alone = session.generate(HELLO, settings)
    assert first not in alone.token_ids
    assert chat(client, **asked).choices[0].message.content == alone.text
    assert (
        client.responses.create(
            model="tiny", input="hi there", max_output_tokens=12, extra_body=asked
        ).output_text
        == alone.text
    )
    for bias in ({"x": 1}, {"5": "x"}, {str(10**6): 1}, {"5": 200}, {"9" * 5000: 1}):
        with pytest.raises(openai.BadRequestError) as wrong:
            chat(client, logit_bias=bias)
        assert wrong.value.param == "logit_bias"


def test_several_answers(client: openai.OpenAI) -> None:
    drawn = [choice.message.content for choice in chat(client, n=3, temperature=1.5, seed=5).choices]
    assert len(set(drawn)) == 3
    again = chat(client, temperature=1.5, seed=6).choices[0].message.content
    assert again == drawn[1], "each choice has the seed behind the one before"
    parts = {0: "", 1: "", 2: ""}
    for chunk in chat(client, n=3, temperature=1.5, seed=5, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
    assert list(parts.values()) == drawn
    prompts = client.completions.create(
        model="tiny", prompt=["hi", "hi"], n=2, max_tokens=12, temperature=1.5, seed=5
    )
    assert len({choice.text for choice in prompts.choices}) == 4, "equal prompts, too"
    different = {chat(client, temperature=1.5).choices[0].message.content for _ in range(3)}
    assert len(different) == 3, "without a seed every draw is another"


def test_text_completions(client: openai.OpenAI, session: Session) -> None:
    texts = ["hi there", "who is"]
    answer = client.completions.create(model="tiny", prompt=texts, max_tokens=7)
    alone = [session.generate(text, GenerationConfig(max_new_tokens=7)) for text in texts]
    assert [choice.text for choice in answer.choices] == [done.text for done in alone]
    assert answer.usage.prompt_tokens == sum(done.stats.prompt_tokens for done in alone)
    ids = session.encode(texts[0])
    assert client.completions.create(model="tiny", prompt=ids, max_tokens=7).choices[0].text == alone[0].text
    asked = {"model": "tiny", "prompt": "é🙂", "max_tokens": 30, "logprobs": 1, "temperature": 3, "seed": 2}
    [whole] = client.completions.create(**asked).choices
    pieces = [
        offset
        for chunk in client.completions.create(**asked, stream=True)
        for piece in chunk.choices
        if piece.logprobs is not None
        for offset in piece.logprobs.text_offset
    ]
    assert pieces == whole.logprobs.text_offset, "the same whole as in a stream"
    streamed = client.completions.create(model="tiny", prompt=texts[0], max_tokens=7, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == alone[0].text
    assert client.completions.create(model="tiny", prompt="hi").usage.completion_tokens == 16


def test_errors_are_the_packages_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        chat(client, model="gpt-4")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    long, odd = ([{"role": role, "content": "word " * n}] for role, n in (("user", 600), ("grammar", 1)))
    schema = {
        "type": "json_schema",
        "json_schema": {
            "schema": {"type": "object", "properties": dict.fromkeys(map(str, range(501)), True)}
        },
    }
    for asked, code, param in (
        ({"frequency_penalty": 2.5}, "invalid_value", "frequency_penalty"),
        ({"stop": list("abcdefghijklmnopq")}, "invalid_value", "stop"),
        ({"response_format": {"type": "json_object", "schemas": {}}}, "invalid_value", "response_format"),
        ({"response_format": {"type": "text", "schema": {}}}, "invalid_value", "response_format"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "unsupported_parameter", "tools"),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "a", "prefix": True}]},
            "unsupported_parameter",
            "messages",
        ),
        ({"messages": long}, "context_length_exceeded", "messages"),
        ({"messages": odd}, "invalid_value", "messages"),
        ({"temperature": -1}, "invalid_value", "temperature"),
        ({"extra_body": {"top_k": -5}}, "invalid_value", "top_k"),
        ({"extra_body": {"grammar": "none"}}, "invalid_grammar", "grammar"),
        ({"response_format": schema}, "invalid_value", "response_format"),
    ):
        with pytest.raises(openai.BadRequestError) as wrong:
            chat(client, **asked)
        assert (wrong.value.code, wrong.value.param) == (code, param)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/chat/completions",
            {"verbosity": "low", "reasoning_effort": "max", "prompt_cache_options": {"ttl": "30m"}},
        ),
        ("/v1/responses", {"input": "hi", "text": {"verbosity": "low"}, "reasoning": {"effort": "max"}}),
        ("/v1/messages", {"output_config": {"effort": "max"}, "diagnostics": {}, "fallbacks": "default"}),
    ],
)
def test_fields_without_effect_are_accepted(path: str, fields: dict[str, Any], server: Serving) -> None:
    said = {} if "input" in fields else {"messages": HELLO}
    answer = server.call(path, {**said, **fields, "model": "tiny"})
    assert answer.status == 200, answer.data


def test_a_running_stream_is_steered(session: Session) -> None:
    slow, pace = paced(session)
    with serving({"tiny": slow}) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        pace.hold()
        stream = chat(client, max_tokens=40, stream=True, extra_body={"tau": 1.0, "return_steps": True})
        chunks: list[Any] = []
        reader = threading.Thread(target=lambda: chunks.extend(stream))
        pace.let(1)
        try:
            name = next(iter(stream)).id
            reader.start()
            _steer(server, f"/v1/mars/streams/{name}", pace)
        finally:
            pace.open()
        reader.join(30)
        steps = [step["tokens"] for chunk in chunks for step in chunk.choices[0].steps]
        assert [len(step) for step in steps[:4]] == [1] * 4, "at tau 1"
        assert len(steps[4]) > 1, "at tau 0"
        assert {token["how"] for step in steps[:6] for token in step} == {"accepted"}
        before, rest = ([t["id"] for step in part for t in step] for part in (steps[:6], steps[6:]))
        one_token = GenerationConfig(tau=1.0, max_new_tokens=len(rest))
        alone = session.generate([*session.encode(HELLO), *before], one_token)
        assert list(alone.token_ids) == rest, "in exact mode"
        assert chunks[-1].mars["exact"] is True
        until(lambda: server.call(f"/v1/mars/streams/{name}", {"tau": 0.5}).status == 404)


def _steer(server: Serving, path: str, pace: Paced) -> None:
    """Four steps at tau 1, two at 0, the rest exact: a step that waits has the settings of its beginning."""
    pace.let(2)
    until(lambda: pace.is_waiting)
    assert server.call(path, {"tau": 0.0}).json["mars"]["tau"] == 0.0
    assert server.call(path, {"tau": -1}).status == server.call(path, {}).status == 400
    assert server.call(path, {"tau": 0.5, "exact": True}).status == 400
    assert server.call(path, {"taux": 1}).json["error"]["param"] == "taux"
    pace.let(2)
    until(lambda: pace.is_waiting)
    assert server.call(path, {"exact": True}).json["mars"] == {
        "exact": True, "tau": None, "metric": "probability", "profile": None, "masks": "auto",
    }  # fmt: skip


def test_an_unknown_path_names_the_known_ones(server: Serving) -> None:
    missing = server.call("/v1/embeddings", {"input": "hi"})
    assert missing.status == 404
    message = missing.json["error"]["message"]
    assert message.startswith("no /v1/embeddings here; there are /v1/chat/completions, /v1/completions,")
    assert server.call("/v1/chat/completions").json["error"]["message"].endswith("GET; use POST")
