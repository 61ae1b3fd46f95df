"""Calls read back from answers: cut anywhere, they give the same deltas."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.paths import ROOT

from mars_export.runtime.text import Text
from mars_export.runtime.toolcalls import Delta, ToolCall, ToolStream, dialect_of, joined, list_schema, parse

ROWS = (ROOT / "examples/default-checkpoint/data/assistant.test.jsonl").read_text("utf-8").splitlines()
ANSWERS = [json.loads(line)["answer"] for line in ROWS]
ODD = [
    ' [ { "name" : "a" , "arguments" : { "x" : [ 1, "}]\\"{" ] } } '
    ', {"arguments": {}, "name": "b\\u00e9"} ] ',
    "no calls, just text with [ and {",
    "",
    "[]",
    '[{"name": "cut", "arguments": {"x": "',
]


def tagged(answer: str) -> str:
    calls = [json.dumps(call, ensure_ascii=False) for call in json.loads(answer)]
    return "Well < then. " + " and ".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls) + " <tool"


def whole(text: str, dialect: Any, cuts: list[int]) -> tuple[list[Delta], Any]:
    stream, deltas = ToolStream(dialect), []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        deltas += stream.push(text[start:end])
    return joined(deltas + stream.finish()), stream.answer


@pytest.mark.parametrize("dialect", ["list", "tags"])
def test_every_cut_gives_the_same_deltas(dialect: Any) -> None:
    for answer in [*ANSWERS[::4], *ODD]:
        text = tagged(answer) if dialect == "tags" and answer in ANSWERS else answer
        expected = whole(text, dialect, [])
        assert whole(text, dialect, list(range(1, len(text)))) == expected
        for cut in range(len(text)):
            assert whole(text, dialect, [cut]) == expected


def test_calls_are_what_was_written() -> None:
    for answer in ANSWERS:
        expected = [(call["name"], call["arguments"]) for call in json.loads(answer)]
        for text, dialect in ((answer, "list"), (tagged(answer), "tags")):
            deltas, found = whole(text, dialect, [])
            assert [(call.name, json.loads(call.arguments)) for call in found.calls] == expected
            assert [d.name for d in deltas if d.name is not None] == [name for name, _ in expected]
            by_delta = ["".join(d.arguments for d in deltas if d.index == i) for i in range(len(expected))]
            assert [json.loads(text) for text in by_delta] == [arguments for _, arguments in expected]
    assert found.text.startswith("Well < then. ") and found.text.endswith(" <tool")


def test_odd_answers() -> None:
    spaced = '{ "x" : [ 1, "}]\\"{" ] }'
    assert parse(ODD[0], "list").calls == (ToolCall("a", spaced), ToolCall("bé", "{}"))
    assert parse(ODD[1], "list").text == ODD[1] and parse(ODD[1], "tags").text == ODD[1]
    assert parse(ODD[4], "list").calls == ()


def test_references_of_parameters_count_from_their_new_place() -> None:
    own = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": own}}
    schema = list_schema([tool])
    assert schema["$defs"]["tool0"]["properties"]["x"] == {"$ref": "#/$defs/tool0/$defs/n"}
    assert schema["items"]["anyOf"][0]["properties"]["arguments"] == {"$ref": "#/$defs/tool0"}


def test_a_template_that_takes_tools_is_given_them_and_another_a_system_message() -> None:
    from tokenizers import Tokenizer, models

    tools = json.dumps([{"type": "function", "function": {"name": "stop"}}])
    blank = Tokenizer(models.BPE())
    ask = [{"role": "user", "content": "hi"}]
    takes = Text(blank, "{% for t in tools %}{{ t.function.name }};{% endfor %}{{ messages[-1].content }}")
    assert takes.render(ask, tools=tools) == "stop;hi" and takes.render(ask) == "hi"
    plain = Text(blank, "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    assert plain.render(ask) == "<user>hi"
    assert plain.render(ask, tools=tools).startswith(
        "<system>Reply with tool calls"
    ) and "stop" in plain.render(ask, tools=tools)
    own = [{"role": "system", "content": "mine"}, *ask]
    assert plain.render(own, tools=tools) == "<system>mine<user>hi"
    assert (dialect_of(None), dialect_of("a <tool_call> b")) == ("list", "tags")
