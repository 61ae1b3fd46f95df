"""Schemas and tools, as clients of OpenAI's send them."""

from __future__ import annotations

import json
from itertools import takewhile
from typing import Any

import pytest
from support.missing import need
from support.questions import STOP, WEATHER

need("uvicorn", "serve")
need("openai", "dev")

import openai  # noqa: E402
from support.served import HELLO, Serving, chat  # noqa: E402

from mars_export import Chat, GenerationConfig, Session  # noqa: E402
from mars_export.runtime.text.prompts import Prompts  # noqa: E402


def test_a_schema(client: openai.OpenAI) -> None:
    need("llguidance", "grammar")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {**schema, "additionalProperties": False}},
    }
    answer = chat(client, response_format=form, max_tokens=60, extra_body={"return_steps": True})
    assert json.loads(answer.choices[0].message.content)["a"] in (1, 2)
    assert answer.choices[0].finish_reason == "stop"
    hows = [t["how"] for step in answer.choices[0].steps for t in step["tokens"]]
    assert hows.count("forced") > 3, hows
    loose = chat(client, response_format={"type": "json_object", "schema": form["json_schema"]["schema"]})
    assert "a" in json.loads(loose.choices[0].message.content)
    with pytest.raises(openai.BadRequestError) as wrong:
        chat(client, response_format={"type": "json_schema", "json_schema": {"schema": {"not": {}}}})
    assert (wrong.value.param, wrong.value.code) == ("response_format", "invalid_grammar")


@pytest.mark.parametrize("kind", ["chat", "responses", "messages"])
def test_tools_beside_a_schema(kind: str, server: Serving) -> None:
    """As agents send them: calls, or an answer of that schema. A bias decides which."""
    need("llguidance", "grammar")
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "$defs": {"b": {}}}
    schema["additionalProperties"] = False
    function = {"name": "stop", "parameters": {"type": "object", "properties": {}}}
    body, path = {
        "chat": ({"messages": HELLO, "tools": [{"type": "function", "function": function}], "response_format":
                  {"type": "json_schema", "json_schema": {"schema": schema}}}, "chat/completions"),
        "responses": ({"input": "hi", "tools": [{"type": "function", **function}], "text":
                       {"format": {"type": "json_schema", "schema": schema}}}, "responses"),
        "messages": ({"messages": HELLO, "tools": [{"name": "stop", "input_schema": function["parameters"]}],
                      "output_config": {"format": {"type": "json_schema", "schema": schema}}}, "messages"),
    }[kind]  # fmt: skip
    limit = "max_output_tokens" if kind == "responses" else "max_tokens"
    for first, wanted in (("{", json.dumps('{"a": 1}')), ("[", '"name": "stop"')):
        [token] = server.door.service.models.models["tiny"].source.text.tokenizer.encode(first).ids
        answer = server.call(f"/v1/{path}", {**body, limit: 90, "logit_bias": {str(token): 100}})
        assert answer.status == 200, answer.json
        assert wanted in json.dumps(answer.json)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_calls_of_tools(choice: Any, client: openai.OpenAI) -> None:
    need("llguidance", "grammar")
    asked: dict[str, Any] = {"tools": [WEATHER, STOP], "tool_choice": choice, "max_tokens": 300}
    answer = chat(client, **asked)
    calls = answer.choices[0].message.tool_calls
    assert {call.function.name for call in calls} <= {"weather", "stop"}
    assert answer.choices[0].message.content is None
    if choice != "required":
        assert [call.function.name for call in calls] == ["weather"], "one call, and this one"
        assert answer.choices[0].finish_reason == "tool_calls" and answer.mars["finish_reason"] != "cancelled"
    assert [json.loads(call.function.arguments) for call in calls]
    found: dict[int, list[str]] = {}
    for chunk in chat(client, **asked, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            name = [part.function.name] if part.function.name else []
            whole = found.setdefault(part.index, [*name, ""])
            whole[-1] += part.function.arguments or ""
            assert (part.id is not None) == bool(name)
    assert [tuple(whole) for whole in found.values()] == [
        (call.function.name, call.function.arguments) for call in calls
    ]


def test_tools_that_need_not_be_called(client: openai.OpenAI, session: Session) -> None:
    told = session.encode(Chat(HELLO, tools=json.dumps([WEATHER])))
    alone = session.generate(told, GenerationConfig(max_new_tokens=12))
    answer = chat(client, tools=[WEATHER])
    assert answer.choices[0].message.content == alone.text and not answer.choices[0].message.tool_calls
    assert answer.usage.prompt_tokens == len(told)
    other = session.encode(Chat([{"role": "user", "content": "another one"}], tools=json.dumps([WEATHER])))
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(told, other, strict=False)))
    marks = Prompts(session.bundle, session.text, 10**4).marks(told, None, json.dumps([WEATHER]))
    assert marks == (shared,), "the prefix cache keeps the beginning with the tools"
    assert chat(client, tools=[WEATHER], tool_choice="none").choices[0].message.content == (
        chat(client).choices[0].message.content
    )


def test_a_conversation_with_calls_goes_on(client: openai.OpenAI, session: Session) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "stop", "arguments": '{"now": true}'}}
    turns = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "ok"}]
    answer = chat(client, messages=turns)
    spelled = '[{"name": "stop", "arguments": {"now": true}}]'
    plain = [*HELLO, {"role": "assistant", "content": spelled}, {"role": "tool", "content": "ok"}]
    alone = session.generate(plain, GenerationConfig(max_new_tokens=12))
    assert answer.choices[0].message.content == alone.text


@pytest.mark.parametrize("arguments", [None, {}, {"now": True}])
def test_null_and_objects_in_the_history(arguments: Any, client: openai.OpenAI) -> None:
    """Clients replay refusals without a text, and calls whose arguments are no JSON text."""
    spelled = json.dumps(arguments or {})
    answers = []
    for made in (arguments, spelled):
        function = {"name": "stop", "arguments": made}
        call = {"id": "call_1", "type": "function", "function": function}
        turns = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
        turns += [{"role": "tool", "content": "ok"}, {"role": "assistant", "content": None, "refusal": "no"}]
        tools = [{"type": "function", "function": {"name": "stop", "parameters": None}}]
        answers.append(chat(client, messages=[*turns, *HELLO], tools=tools).choices[0].message.content)
    assert answers[0] == answers[1]
