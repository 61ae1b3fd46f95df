"""Thinking over HTTP: a tiny Qwen3 with a template of that form, which says what a test wants."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import support.fake
from support import tiny
from support.exports import export
from support.fake import FakeBackend
from support.missing import need
from support.tiny import Named

need("uvicorn", "serve")
need("openai", "dev")
need("anthropic", "dev")

import anthropic  # noqa: E402
import openai  # noqa: E402
from support.served import HELLO, Serving, serving  # noqa: E402

from mars_export import Session  # noqa: E402

NO_THINKING = "{{ '<think>\\n\\n</think>\\n\\n' }}"
TEMPLATE = (
    tiny.CHAT_TEMPLATE.removesuffix("{% endif %}")
    + "{% if enable_thinking is defined and enable_thinking is false %}"
    + NO_THINKING
    + "{% endif %}{% endif %}"
)
THOUGHT, SAID = "It is a greeting.\nI greet.", "Hello <think> there!"
ANSWERS = {
    "assistant\n<think>\n\n</think>\n\n": SAID,
    "assistant\n": f"<think>\n{THOUGHT}\n</think>\n\n{SAID}",
}


class Saying(FakeBackend):
    """Continues the beginnings of `ANSWERS`."""

    def __init__(self, session: Session) -> None:
        super().__init__(self._next, 512)
        text = session.text
        assert text is not None
        self._scripts = [(text.encode_part(k), text.encode_part(v)) for k, v in ANSWERS.items()]

    def _next(self, known: Sequence[int], masks: int) -> tuple[int, float]:
        turn = list(known)
        turn = turn[len(turn) - turn[::-1].index(tiny.IM_START) :] if tiny.IM_START in turn else []
        for beginning, answer in self._scripts:
            if turn[: len(beginning)] == beginning:
                return [*answer, tiny.IM_END, *[1] * 99][len(turn) - len(beginning) + masks], 0.9
        return tiny.IM_END, 0.9


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory, checkpoints: Named) -> Session:
    directory: Path = tmp_path_factory.mktemp("thinking")
    shutil.copytree(checkpoints("qwen3"), directory / "checkpoint")
    tiny.change_config(directory / "checkpoint", "tokenizer_config.json", chat_template=TEMPLATE)
    export(directory / "checkpoint", directory / "bundle", block=6)
    return Session.open(directory / "bundle", threads=1, cache_bytes=0)


@pytest.fixture(scope="module")
def server(session: Session) -> Iterator[Serving]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support.fake, "MASK", tiny.MASK)
        with serving(
            {"tiny": Session(session.bundle, session.variant, Saying(session), session.text)}
        ) as running:
            yield running


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": HELLO, **fields})


def test_the_export_recognizes_the_marks(session: Session) -> None:
    text = session.bundle.manifest.text
    assert text is not None and text.thinking is not None
    assert (text.thinking.open, text.thinking.close) == ("<think>", "</think>")


def test_a_chat(client: openai.OpenAI) -> None:
    answer = chat(client, extra_body={"return_steps": True}).choices[0]
    assert (answer.message.reasoning_content, answer.message.content) == (THOUGHT, SAID)
    tokens = [token for step in answer.steps for token in step["tokens"]]
    whole = "".join(token["text"] for token in tokens)
    assert whole == ANSWERS["assistant\n"]
    folded = "".join(token["text"] for token in tokens if token.get("thinking"))
    assert folded == whole.removesuffix(SAID)
    assert client.models.retrieve("tiny").mars["thinking"] is True
    deltas = [chunk.choices[0].delta for chunk in chat(client, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == THOUGHT
    assert "".join(delta.content or "" for delta in deltas) == SAID


def test_stop_strings_apply_to_the_answer_alone(client: openai.OpenAI, server: Serving) -> None:
    """Both are in the thinking, too: a newline, and words of it."""
    for stop, kept in (("\n", SAID), ("greet", SAID), ("there", "Hello <think> ")):
        message = chat(client, stop=[stop]).choices[0].message
        assert (message.reasoning_content, message.content) == (THOUGHT, kept), stop
        deltas = [chunk.choices[0].delta for chunk in chat(client, stop=[stop], stream=True)]
        assert "".join(delta.content or "" for delta in deltas) == kept, stop
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 200, "stop_sequences": ["\n"]}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=30) as messages:
        thought, text = messages.messages.create(**asked).content
    assert (thought.thinking, text.text) == (THOUGHT, SAID)


@pytest.mark.parametrize(
    "fields",
    [{"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}],
)
def test_without_thinking(fields: dict[str, Any], client: openai.OpenAI) -> None:
    message = chat(client, **fields).choices[0].message
    assert message.content == SAID and not hasattr(message, "reasoning_content")
    assert chat(client, reasoning_effort="high").choices[0].message.reasoning_content == THOUGHT


def test_a_grammar_leaves_no_room_for_thinking(client: openai.OpenAI) -> None:
    need("llguidance", "grammar")
    message = chat(client, extra_body={"regex": "<think>a</think>b"}).choices[0].message
    assert message.content == "<think>a</think>b" and not hasattr(message, "reasoning_content")


def test_wrong_variables(client: openai.OpenAI) -> None:
    for fields, param in (
        ({"extra_body": {"chat_template_kwargs": {"enable_thinkng": False}}}, "chat_template_kwargs"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
        ({"reasoning_effort": "a lot"}, "reasoning_effort"),
    ):
        with pytest.raises(openai.BadRequestError) as wrong:
            chat(client, **fields)
        assert wrong.value.param == param


def test_responses(client: openai.OpenAI, session: Session) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "hi there"}
    answer = client.responses.create(**asked)
    reasoning, message = answer.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", THOUGHT)
    assert message.content[0].text == SAID
    assert session.text is not None
    num_thinking = len(session.text.encode_part(ANSWERS["assistant\n"].removesuffix(SAID)))
    assert answer.usage.output_tokens_details.reasoning_tokens == num_thinking
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == THOUGHT
    assert [e.text for e in events if e.type == "response.reasoning_text.done"] == [THOUGHT]
    assert final.output_text == SAID and [item.type for item in final.output] == ["reasoning", "message"]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert final.usage is not None and final.usage.output_tokens_details.reasoning_tokens == num_thinking
    answer = client.responses.create(**asked, reasoning={"effort": "none"})
    assert [item.type for item in answer.output] == ["message"] and answer.output_text == SAID


def test_messages(server: Serving) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 200}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=30) as client:
        thought, text = client.messages.create(**asked).content
        assert (thought.type, thought.thinking, text.text) == ("thinking", THOUGHT, SAID)
        with client.messages.stream(**asked, thinking={"type": "enabled", "budget_tokens": 1024}) as stream:
            assert "".join(e.thinking for e in stream if e.type == "thinking") == THOUGHT
            assert [block.type for block in stream.get_final_message().content] == ["thinking", "text"]
        [text] = client.messages.create(**asked, thinking={"type": "disabled"}).content
        assert text.text == SAID
        off, on = (
            client.messages.count_tokens(model="tiny", messages=HELLO, thinking=thinking).input_tokens
            for thinking in ({"type": "disabled"}, {"type": "adaptive"})
        )
        assert off > on
