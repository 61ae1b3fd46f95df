"""Calls read back from answers: what is no call is text, however the answer is cut."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paths import ROOT

from mars_export.runtime.text.tokenizer import Text
from mars_export.runtime.text.toolcalls import (
    Dialect,
    ToolAnswer,
    ToolCall,
    ToolStream,
    dialect_of,
    list_schema,
)

ROWS = (ROOT / "examples/default-checkpoint/data/assistant.test.jsonl").read_text("utf-8").splitlines()
ANSWERS = [json.loads(line)["answer"] for line in ROWS]


def tagged(answer: str) -> str:
    calls = [json.dumps(call, ensure_ascii=False) for call in json.loads(answer)]
    return "Well < then. " + " and ".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls) + " <tool"


def whole(text: str, dialect: Dialect, cuts: Iterable[int] = ()) -> list[str | ToolCall]:
    """What a stream reports of a text that comes in pieces, neighbouring texts joined."""
    stream, items = ToolStream(dialect), list[str | ToolCall]()
    edges = [0, *sorted(cuts), len(text)]
    for start, end in pairwise(edges):
        items += stream.push(text[start:end])
    items += stream.finish()
    joined: list[str | ToolCall] = []
    for item in items:
        if isinstance(item, str) and joined and isinstance(last := joined[-1], str):
            joined[-1] = last + item
        else:
            joined.append(item)
    texts, calls = (tuple(i for i in joined if isinstance(i, kind)) for kind in (str, ToolCall))
    assert stream.answer == ToolAnswer("".join(map(str, texts)), calls)  # type: ignore[arg-type]
    return joined


def nothing_is_lost(text: str, dialect: Dialect, items: list[str | ToolCall]) -> None:
    """The text is what was reported as text, and between it calls in what may stand around a call."""
    opening, closing = (
        (r"[\s\[,]*", r"[\s\],]*") if dialect == "list" else (r"<tool_call>\s*", r"\s*(?:</tool_call>)?")
    )
    pattern = "".join(
        re.escape(item) if isinstance(item, str) else rf"{opening}(\{{(?:(?!</?tool_call>).)*?\}}){closing}"
        for item in items
    )
    match = re.fullmatch(pattern, text, re.DOTALL)
    assert match is not None, (text, items)
    for source, call in zip(match.groups(), (i for i in items if isinstance(i, ToolCall)), strict=True):
        value = json.loads(source)
        assert (value["name"], value.get("arguments", {})) == (call.name, json.loads(call.arguments))


PIECES = [
    *("[", "]", "{", "}", ",", '"', "\\", " ", "\n", "<", "and", '{"a": 1}', "<tool_call>", "</tool_call>"),
    *('{"name": "f", "arguments": {"x": "}]"}}', '{"name": "g"}', '"arguments": {}', "<tool_call>\n{"),
]


@st.composite
def answers(draw: st.DrawFn) -> str:
    """Calls in both dialects and their parts, with characters dropped."""
    text = "".join(draw(st.lists(st.sampled_from([*PIECES, ANSWERS[0], tagged(ANSWERS[1])]), max_size=8)))
    for at in draw(st.lists(st.integers(0, max(0, len(text) - 1)), max_size=2)):
        text = text[:at] + text[at + 1 :]
    return text


@settings(max_examples=600, deadline=None)
@given(answers(), st.sampled_from(["list", "tags"]), st.data())
def test_text_in_is_text_out_whatever_is_a_call(text: str, dialect: Dialect, data: st.DataObject) -> None:
    items = whole(text, dialect)
    nothing_is_lost(text, dialect, items)
    cuts = data.draw(st.sets(st.integers(0, len(text))))
    assert whole(text, dialect, cuts) == whole(text, dialect, range(1, len(text))) == items


@pytest.mark.parametrize("dialect", ["list", "tags"])
def test_calls_are_what_was_written(dialect: Dialect) -> None:
    for answer in ANSWERS:
        expected = [(call["name"], call["arguments"]) for call in json.loads(answer)]
        items = whole(tagged(answer) if dialect == "tags" else answer, dialect)
        calls = [(item.name, json.loads(item.arguments)) for item in items if isinstance(item, ToolCall)]
        assert calls == expected
    if dialect == "tags":
        assert (items[0], items[-1]) == ("Well < then. ", " <tool")


SPACED = '{ "x" : [ 1, "}]\\"{" ] }'
A, AT = ToolCall("a", "{}"), '{"name": "a", "arguments": {}}'
NO_LIST = [
    "no calls, but [ and {",
    "[]",
    " [1, 2] ",
    '[{"a": 1}] See',
    '[{"name": "cut", "arguments": {"x": "',
]
NO_CALL = [
    *("\nnot json", "{" * 100_000 + "}" * 100_000, '{"name": "a"]', '{"name": ["a"]}', '{"name": "\\ud800"}'),
    *('{"name": "a", "name": "b"}', '{"name": "a", "arguments": {}, "arguments": {"z": 1}}'),
    *('{"name": "a", "arguments": 5}', '{"name": "a", "arguments": {"x": NaN}}'),
]


def test_what_is_no_call_is_text() -> None:
    odd = f' [ {{ "name" : "a" , "arguments" : {SPACED} }} , {{"name": "b\\u00e9"}} ] '
    assert whole(odd, "list") == [ToolCall("a", SPACED), ToolCall("bé", "{}")]
    assert whole(f"[{AT}] Done.", "list") == [A, " Done."]
    assert whole(f'[{AT}, {{"name": "cut", "arg', "list") == [A, ', {"name": "cut", "arg']
    assert whole(f"so <tool_call>{AT} oops</tool_call> more", "tags") == ["so ", A, " oops</tool_call> more"]
    assert whole(f"<tool_call>{AT}<tool_call>{AT}\n", "tags") == [A, A]
    for text in NO_LIST:
        assert whole(text, "list") == [text]
    for inner in NO_CALL:
        text = f"Hello <tool_call>{inner}</tool_call> and the rest"
        assert whole(text, "tags") == [text]


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
    listed = plain.render(ask, tools=tools).removeprefix("<system>")
    assert plain.render(own, tools=tools) == f"<system>mine\n\n{listed}"
    assert own[0]["content"] == "mine" and plain.render(own) == "<system>mine<user>hi"
    assert (dialect_of(None), dialect_of("a <tool_call> b")) == ("list", "tags")
