"""/v1/responses: the openai package's `responses` against a real server on a tiny bundle."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.missing import need
from support.stalling import close_in_a_step, paced

need("uvicorn", "serve")
need("openai", "dev")

import openai  # noqa: E402
from openai.types.responses import ResponseErrorEvent  # noqa: E402
from pydantic import BaseModel  # noqa: E402
from support.served import HELLO, serving  # noqa: E402

from mars_export import Chat, GenerationConfig, Session  # noqa: E402
from mars_export.runtime.serve.api_error import ApiError  # noqa: E402
from mars_export.runtime.serve.responses.protocols.openai_responses import ResponsesSerializer  # noqa: E402

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "of a city", "parameters": CITY}
CHAT_WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": CITY},
}
SAID = "hi there"


def respond(client: openai.OpenAI, **fields: Any) -> Any:
    return client.responses.create(**{"model": "tiny", "input": SAID, "max_output_tokens": 12, **fields})


def alone(session: Session, messages: list[Any]) -> str:
    return session.generate(messages, GenerationConfig(max_new_tokens=12)).text


def test_an_answer_is_that_of_a_chat(client: openai.OpenAI, session: Session) -> None:
    answer = respond(client)
    assert answer.output_text == alone(session, HELLO)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == 12
    assert answer.usage.total_tokens == answer.usage.input_tokens + 12
    assert answer.usage.input_tokens == len(session.encode(HELLO))
    assert answer.mars["exact"] is True and answer.store is False
    assert respond(client, extra_body={"tau": 0.5}).mars["tau"] == 0.5


def test_log_probabilities(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=12, logprobs=True, top_logprobs=2
    )
    expected = [(token.token, token.logprob) for token in chat.choices[0].logprobs.content]
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    [part] = respond(client, **asked).output[0].content
    assert [token.token for token in part.logprobs] == [token for token, _ in expected]
    # Steps of another width round differently.
    assert [token.logprob for token in part.logprobs] == pytest.approx([p for _, p in expected], abs=1e-4)
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)
    events = list(respond(client, stream=True, **asked))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert [token.token for token in done.logprobs] == [token for token, _ in expected]
    sent = [token for delta in deltas for token in delta.logprobs]
    assert [token.token for token in sent] == [token for token, _ in expected][: len(sent)] != []
    [whole] = events[-1].response.output[0].content
    assert [token.token for token in whole.logprobs] == [token.token for token in part.logprobs]


def test_items_are_the_messages_of_a_chat(client: openai.OpenAI, session: Session) -> None:
    items = [
        {"role": "developer", "content": "be kind"},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "hi "}, {"type": "input_text", "text": "there"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "user", "content": "go on"},
    ]
    messages = [
        {"role": "system", "content": "be short\n\nbe kind"},
        *HELLO,
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "go on"},
    ]
    answer = respond(client, input=items, instructions="be short")
    assert answer.output_text == alone(session, messages)
    assert answer.instructions == "be short"


def test_a_stream_has_the_events_that_the_client_expects(client: openai.OpenAI) -> None:
    whole = respond(client)
    events = list(respond(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert "".join(e.delta for e in events if e.type.endswith("delta")) == whole.output_text
    last = events[-1].response
    assert last.output_text == whole.output_text and last.usage.output_tokens == 12
    assert {event.response.id for event in events if hasattr(event, "response")} == {last.id}
    with client.responses.stream(model="tiny", input=SAID, max_output_tokens=12) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
    assert snapshots[-1] == whole.output_text


def test_a_schema(client: openai.OpenAI) -> None:
    need("llguidance", "grammar")

    class Number(BaseModel):
        a: int

    answer = client.responses.parse(model="tiny", input=SAID, text_format=Number, max_output_tokens=60)
    assert isinstance(answer.output_parsed, Number) and answer.status == "completed"
    with pytest.raises(openai.BadRequestError, match="not"):
        respond(client, text={"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_calls(choice: Any, client: openai.OpenAI) -> None:
    need("llguidance", "grammar")
    asked: dict[str, Any] = {"tools": [WEATHER], "tool_choice": choice, "max_output_tokens": 300}
    answer = respond(client, **asked)
    form = {"format": {"type": "json_schema", "name": "text", "schema": CITY}}  # as instructor sends it
    assert respond(client, **asked, text=form).output[0].arguments == answer.output[0].arguments
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls and {call.name for call in calls} == {"weather"}
    assert answer.tool_choice == choice or answer.tool_choice.name == "weather"
    assert json.loads(calls[0].arguments)["city"] in ("Rome", "Oslo")
    assert len({call.call_id for call in calls}) == len(calls)
    streamed = list(respond(client, **asked, stream=True))
    done = [e.item for e in streamed if e.type == "response.output_item.done"]
    assert [(item.name, item.arguments) for item in done] == [(call.name, call.arguments) for call in calls]
    pieces = [e.delta for e in streamed if e.type == "response.function_call_arguments.delta"]
    assert pieces == [call.arguments for call in calls]
    assert [item.to_dict() for item in streamed[-1].response.output] == [item.to_dict() for item in done]


def test_a_conversation_with_calls_goes_on(client: openai.OpenAI, session: Session) -> None:
    call = {"call_id": "call_1", "type": "function_call", "name": "stop", "arguments": '{"now": true}'}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "ok"}
    answer = respond(client, input=[{"role": "user", "content": SAID}, call, output])
    spelled = '[{"name": "stop", "arguments": {"now": true}}]'
    turns = [*HELLO, {"role": "assistant", "content": spelled}, {"role": "tool", "content": "ok"}]
    assert answer.output_text == session.generate(turns, GenerationConfig(max_new_tokens=12)).text
    told = session.encode(Chat(HELLO, tools=json.dumps([CHAT_WEATHER])))
    assert respond(client, tools=[WEATHER]).usage.input_tokens == len(told)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"truncation": "auto"}, "unsupported_parameter", "truncation"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools"),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"include": ["file_search_call.results"]}, "unsupported_parameter", "include"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "invalid_value", "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "unsupported_parameter", "input"),
        ({"input": [{"role": "user"}]}, "invalid_value", "input"),
        ({"input": [7]}, "invalid_value", "input"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "invalid_value", "input"),
        ({"input": "word " * 600}, "context_length_exceeded", "input"),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "invalid_value", "text"),
        ({"text": {"colour": 1}}, "invalid_value", "text"),
        ({"extra_body": {"messages": []}}, "invalid_value", "messages"),
        ({"extra_body": {"top_k": -5}}, "invalid_value", "top_k"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(
    client: openai.OpenAI, fields: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        respond(client, **fields)
    assert (wrong.value.code, wrong.value.param) == (code, param)


def test_a_stream_that_fails_says_so(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    slow, pace = paced(session)
    with serving({"tiny": slow}) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        pace.hold()
        stream = respond(client, stream=True, max_output_tokens=40)
        pace.let(1)
        try:
            assert next(iter(stream)).type == "response.created"
            close_in_a_step(server.door.service.models, pace, caplog)
        finally:
            pace.open()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)


def test_the_event_of_an_error_is_that_of_the_api(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: object) -> None:
        raise ApiError(503, "no memory", code="out_of_memory")

    monkeypatch.setattr(ResponsesSerializer, "chunks", panic)
    with client.responses.with_streaming_response.create(model="tiny", input=SAID, stream=True) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    event = ResponseErrorEvent.model_validate(events[-1])
    assert (event.message, event.code, event.sequence_number) == (
        "no memory",
        "out_of_memory",
        len(events) - 1,
    )
    assert events[-1]["error"]["message"] == "no memory", "the packages raise for this one"
