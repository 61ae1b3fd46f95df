"""/v1/messages: the anthropic package against a real server on a tiny bundle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from support.missing import need
from support.stalling import close_in_a_step, paced

need("uvicorn", "serve")
need("anthropic", "dev")

import anthropic  # noqa: E402
from support.served import HELLO, Serving, serving  # noqa: E402

from mars_export import GenerationConfig, Session  # noqa: E402
from mars_export.runtime.serve import ServeOptions  # noqa: E402

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "of a city", "input_schema": CITY}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "stop", "input": {"now": True}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "ok"}]}


def connected(server: Serving, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[anthropic.Anthropic]:
    with connected(server) as made:
        yield made


def ask(client: anthropic.Anthropic, **fields: Any) -> Any:
    return client.messages.create(**{"model": "tiny", "messages": HELLO, "max_tokens": 12, **fields})


def alone(session: Session, messages: list[Any]) -> str:
    return session.generate(messages, GenerationConfig(max_new_tokens=12)).text


def test_an_answer_is_that_of_a_chat(client: anthropic.Anthropic, session: Session) -> None:
    answer = ask(client, metadata={"user_id": "me"})
    [block] = answer.content
    assert (block.type, block.text) == ("text", alone(session, HELLO))
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == ("assistant", "max_tokens", None)
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(session.encode(HELLO))
    assert usage.output_tokens == 12 and answer.mars["exact"] is True
    assert ask(client, extra_body={"tau": 0.5}).mars["tau"] == 0.5


def test_blocks_are_the_messages_of_a_chat(client: anthropic.Anthropic, session: Session) -> None:
    system = [
        {"type": "text", "text": "be "},
        {"type": "text", "text": "kind", "cache_control": {"type": "ephemeral"}},
    ]
    turns = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, CALL]},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "go on"}]},
    ]
    spelled = '[{"name": "stop", "arguments": {"now": true}}]'
    messages = [
        {"role": "system", "content": "be kind"},
        *HELLO,
        {"role": "assistant", "content": spelled},
        {"role": "tool", "content": "ok"},
        {"role": "user", "content": "go on"},
    ]
    assert ask(client, system=system, messages=turns).content[0].text == alone(session, messages)
    turns[-1] = {"role": "user", "content": [RESULT]}
    assert ask(client, messages=turns).content[0].text == alone(session, messages[1:-1])


def test_a_stream_says_the_same(client: anthropic.Anthropic) -> None:
    whole = ask(client)
    with client.messages.stream(model="tiny", messages=HELLO, max_tokens=12) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text and final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 12
    raw = list(ask(client, stream=True))
    deltas = [event.delta.text for event in raw if event.type == "content_block_delta"]
    assert "".join(deltas) == whole.content[0].text and 1 < len(deltas) < 12
    assert [event.type for event in raw] == [
        "message_start", "content_block_start", *["content_block_delta"] * len(deltas),
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert raw[-2].mars["exact"] is True
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    whole = ask(client, max_tokens=40).content[0].text
    stop = whole[9:12]
    for stops in ([stop], ["never in it", stop]):
        answer = ask(client, max_tokens=40, stop_sequences=stops)
        assert answer.content[0].text == whole[: whole.index(stop)]
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_calls(choice: dict[str, Any], client: anthropic.Anthropic) -> None:
    need("llguidance", "grammar")
    asked: dict[str, Any] = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 300}
    answer = ask(client, **asked)
    assert {(block.type, block.name) for block in answer.content} == {("tool_use", "weather")}
    assert answer.content[0].input["city"] in ("Rome", "Oslo")
    assert answer.stop_reason == ("tool_use" if choice["type"] == "tool" else answer.stop_reason)
    with client.messages.stream(model="tiny", messages=HELLO, **asked) as stream:
        final = stream.get_final_message()
    assert [block.input for block in final.content] == [block.input for block in answer.content]
    assert [block.name for block in final.content] == [block.name for block in answer.content]
    once = {"type": "any", "disable_parallel_tool_use": True}
    one = ask(client, tools=[WEATHER], tool_choice=once, max_tokens=300)
    assert len(one.content) == 1 and one.stop_reason == "tool_use"


def test_a_schema(client: anthropic.Anthropic) -> None:
    need("llguidance", "grammar")
    form = {"format": {"type": "json_schema", "schema": {**CITY, "additionalProperties": False}}}
    answer = ask(client, output_config=form, max_tokens=60)
    assert answer.content[0].text in ('{"city": "Rome"}', '{"city": "Oslo"}')
    assert answer.stop_reason == "end_turn"


def test_tokens_are_counted(client: anthropic.Anthropic, session: Session) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=HELLO, system="be kind")
    messages = [{"role": "system", "content": "be kind"}, *HELLO]
    assert counted.input_tokens == len(session.encode(messages))
    with_tools = client.messages.count_tokens(model="tiny", messages=HELLO, tools=[WEATHER])
    usage = ask(client, tools=[WEATHER]).usage
    assert with_tools.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="claude", messages=HELLO)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "unsupported_by_model", "thinking"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "unsupported_parameter", "tools"),
        ({"tool_choice": {"type": "any"}}, "invalid_value", "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "invalid_value", "tool_choice"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "invalid_value", "messages"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "unsupported_parameter", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "invalid_value", "messages"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "invalid_value", "messages"),
        ({"messages": [{"role": "user"}]}, "invalid_value", "messages"),
        ({"messages": [{"role": "user", "content": "word " * 600}]}, "context_length_exceeded", "messages"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"extra_body": {"temperature": -1}}, "invalid_value", "temperature"),
        ({"output_config": {"format": {"type": "xml"}}}, "invalid_value", "output_config"),
        ({"extra_body": {"container": "c"}}, "unsupported_parameter", "container"),
        ({"extra_body": {"thread": {"type": "create"}}}, "unsupported_parameter", "thread"),
        ({"extra_body": {"max_completion_tokens": 3}}, "invalid_value", "max_completion_tokens"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(
    client: anthropic.Anthropic, fields: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as wrong:
        ask(client, **fields)
    body: Any = wrong.value.body
    assert (body["error"]["code"], body["error"]["param"]) == (code, param)
    assert body["type"] == "error", "other clients read the message only then"


def test_a_tool_runner_works_without_stored_threads(client: anthropic.Anthropic) -> None:
    need("llguidance", "grammar")

    @anthropic.beta_tool
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """Of a city."""
        return f"{city}: sunny"

    runner = client.beta.messages.tool_runner(
        model="tiny", messages=HELLO, max_tokens=300, max_iterations=2, tools=[weather],
        tool_choice={"type": "tool", "name": "weather"},
    )  # fmt: skip
    assert [message.stop_reason for message in runner] == ["tool_use", "tool_use"]


def test_its_key_is_a_key(session: Session) -> None:
    with serving({"tiny": session}, ServeOptions(keys=("alpha",))) as server:
        with connected(server, "alpha") as client:
            assert ask(client).content
        with connected(server, "wrong") as client, pytest.raises(anthropic.AuthenticationError):
            ask(client)


def test_a_stream_that_fails_says_so(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    slow, pace = paced(session)
    with serving({"tiny": slow}) as server, connected(server) as client:
        pace.hold()
        stream = ask(client, stream=True, max_tokens=40)
        pace.let(1)
        try:
            assert next(iter(stream)).type == "message_start"
            close_in_a_step(server.door.service.models, pace, caplog)
        finally:
            pace.open()
        with pytest.raises(anthropic.APIStatusError, match="closing"):
            list(stream)
