"""Calls read back from answers: what is no call is text, however the answer is cut."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.paths import ROOT

from mars_export.runtime.bundle.turns import ThinkingMarks
from mars_export.runtime.text.dialects import LIST, MARKED, OBJECT, TAGS, Dialect, calls_schema, dialect_of
from mars_export.runtime.text.toolcalls import ToolAnswer, ToolCall, ToolStream

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
        (r"[\s\[,]*", r"[\s\],]*")
        if dialect == LIST
        else (r"\s*(?:<tool_call>\s*)?[\[,]?\s*", r"\s*\]?\s*(?:</tool_call>)?\s*")
    )
    pattern = "".join(
        re.escape(item) if isinstance(item, str) else rf"{opening}(\{{(?:(?!</?tool_call>).)*?\}}){closing}"
        for item in items
    )
    match = re.fullmatch(pattern, text, re.DOTALL)
    assert match is not None, (text, items)
    for source, call in zip(match.groups(), (i for i in items if isinstance(i, ToolCall)), strict=True):
        value = json.loads(source)
        given = next((value[key] for key in ("arguments", "parameters", "args") if key in value), {})
        given = json.loads(given) if isinstance(given, str) else given
        assert (value["name"], given) == (call.name, json.loads(call.arguments))


PIECES = [
    *("[", "]", "{", "}", ",", '"', "\\", " ", "\n", "<", "and", '{"a": 1}', "<tool_call>", "</tool_call>"),
    *('{"name": "f", "arguments": {"x": "}]"}}', '{"name": "g"}', '"arguments": {}', "<tool_call>\n{"),
    *(
        '{"name": "f", "parameters": {"x": 1}}',
        '{"name": "f", "id": "a", "args": "{\\"x\\": 1}"}',
        "]</tool_call>",
    ),
]


@st.composite
def answers(draw: st.DrawFn) -> str:
    """Calls in both dialects and their parts, with characters dropped."""
    text = "".join(draw(st.lists(st.sampled_from([*PIECES, ANSWERS[0], tagged(ANSWERS[1])]), max_size=8)))
    for at in draw(st.lists(st.integers(0, max(0, len(text) - 1)), max_size=2)):
        text = text[:at] + text[at + 1 :]
    return text


@settings(max_examples=600, deadline=None)
@given(answers(), st.sampled_from([LIST, TAGS]), st.data())
def test_text_in_is_text_out_whatever_is_a_call(text: str, dialect: Dialect, data: st.DataObject) -> None:
    items = whole(text, dialect)
    nothing_is_lost(text, dialect, items)
    cuts = data.draw(st.sets(st.integers(0, len(text))))
    assert whole(text, dialect, cuts) == whole(text, dialect, range(1, len(text))) == items


@pytest.mark.parametrize("dialect", [LIST, TAGS])
def test_calls_are_what_was_written(dialect: Dialect) -> None:
    for answer in ANSWERS:
        expected = [(call["name"], call["arguments"]) for call in json.loads(answer)]
        items = whole(tagged(answer) if dialect == TAGS else answer, dialect)
        calls = [(item.name, json.loads(item.arguments)) for item in items if isinstance(item, ToolCall)]
        assert calls == expected
    if dialect == TAGS:
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
    *('{"name": "a", "arguments": {}, "more": 1}', '{"name": "a", "arguments": {}, "parameters": {}}'),
    *('{"name": "a", "arguments": "[]"}', '{"name": "a", "arguments": "{"}'),
]


def test_what_is_no_call_is_text() -> None:
    odd = f' [ {{ "name" : "a" , "arguments" : {SPACED} }} , {{"name": "b\\u00e9"}} ] '
    assert whole(odd, LIST) == [ToolCall("a", SPACED), ToolCall("bé", "{}")]
    assert whole(f"[{AT}] Done.", LIST) == [A, " Done."]
    assert whole(f'[{AT}, {{"name": "cut", "arg', LIST) == [A, ', {"name": "cut", "arg']
    assert whole(f"so <tool_call>{AT} oops</tool_call> more", TAGS) == ["so ", A, " oops</tool_call> more"]
    assert whole(f"<tool_call>{AT}<tool_call>{AT}\n", TAGS) == [A, A]
    for text in NO_LIST:
        assert whole(text, LIST) == [text]
    for inner in NO_CALL:
        text = f"Hello <tool_call>{inner}</tool_call> and the rest"
        assert whole(text, TAGS) == [text]


def test_references_of_parameters_count_from_their_new_place() -> None:
    own = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": own}}
    schema = calls_schema([tool], LIST)
    assert schema["$defs"]["tool0"]["properties"]["x"] == {"$ref": "#/$defs/tool0/$defs/n"}
    assert schema["items"]["anyOf"][0]["properties"]["arguments"] == {"$ref": "#/$defs/tool0"}


def test_a_template_that_takes_tools_is_given_them_and_another_a_system_message() -> None:
    from tokenizers import Tokenizer, models

    tools = json.dumps([{"type": "function", "function": {"name": "stop"}}])
    blank = Tokenizer(models.BPE())
    ask = [{"role": "user", "content": "hi"}]
    takes = tiny.text(
        blank, "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{{ messages[-1].content }}"
    )
    assert takes.render(ask, tools=tools) == "stop;hi" and takes.render(ask) == "hi"
    plain = tiny.text(blank, "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    assert plain.render(ask) == "<user>hi"
    assert plain.render(ask, tools=tools).startswith(
        "<system>Reply with tool calls"
    ) and "stop" in plain.render(ask, tools=tools)
    own = [{"role": "system", "content": "mine"}, *ask]
    listed = plain.render(ask, tools=tools).removeprefix("<system>")
    assert plain.render(own, tools=tools) == f"<system>mine\n\n{listed}"
    assert own[0]["content"] == "mine" and plain.render(own) == "<system>mine<user>hi"


UTC = ToolCall("now", '{"zone": "UTC \u00e9"}')
ARGS = '{"zone": "UTC \u00e9"}'
AS_TEXT = json.dumps(ARGS, ensure_ascii=False)


@pytest.mark.parametrize("key", ["arguments", "parameters", "args"])
@pytest.mark.parametrize("value", [ARGS, AS_TEXT], ids=["object", "text"])
@pytest.mark.parametrize(
    ("dialect", "form"),
    [
        (LIST, "[%s]"), (LIST, " [%s, %s]"), (TAGS, "<tool_call>%s</tool_call>"), (OBJECT, "%s"),
        (TAGS, "<tool_call>\n%s\n</tool_call>\n<tool_call>\n%s\n</tool_call>"),
        (TAGS, "<tool_call>[%s, %s]</tool_call>"), (OBJECT, "<|python_tag|>%s"), (OBJECT, "%s; %s"),
        (OBJECT, "%s\n%s"), (MARKED[2], "[TOOL_CALLS] [%s, %s]"), (MARKED[2], "[%s]"),
        (MARKED[2], "[TOOL_CALLS]%s"), (MARKED[3], "<|tool_call|>[%s]"),
    ],
)  # fmt: skip
def test_calls_are_read_in_every_form(dialect: Dialect, form: str, key: str, value: str) -> None:
    call = f'{{"name": "now", "{key}": {value}}}'
    text = form.replace("%s", call)
    calls = [UTC] * form.count("%s")
    assert whole(text, dialect) == whole(text, dialect, range(1, len(text))) == calls
    for before in ("<think>no [] {</think>\n\n", "no {</think>"):
        stream = ToolStream(dialect, ThinkingMarks("<think>", "</think>"))
        items = stream.push(before + text) + stream.finish()
        assert items == [before.rstrip("\n"), *calls]


def test_calls_with_a_mark_between_name_and_arguments() -> None:
    text = f"Hm. [TOOL_CALLS]now[ARGS]{ARGS}[TOOL_CALLS]a[CALL_ID]abcdefghi[ARGS]{{}}"
    assert whole(text, MARKED[1]) == ["Hm. ", UTC, A]


@pytest.mark.parametrize("dialect", [LIST, TAGS, OBJECT, *MARKED], ids=str)
def test_the_beginning_of_a_call_in_an_answer_that_is_cut_is_no_text(dialect: Dialect) -> None:
    name = f"now{dialect.args}" if dialect.args else '{"name": "now", "arguments": '
    answer = f"{dialect.open if not dialect.is_bare else ''}{'[' if dialect.is_list else ''}{name}{ARGS}"
    if not dialect.is_bare:
        answer = f"Wait.{answer}"
    shown = "" if dialect.is_bare else "Wait."
    for size in range(len(shown) + 2, len(answer)):
        stream = ToolStream(dialect)
        stream.push(answer[:size])
        stream.finish(is_cut=True)
        assert stream.answer == ToolAnswer(shown, ()), answer[:size]


@pytest.mark.parametrize(
    "text", ['{"name": "Bob"}', '{"name": "Bob", "age": 3}', '{"answer": {"name": "a"}}', "[1]"]
)
def test_an_object_that_is_no_call_is_text(text: str) -> None:
    assert whole(text, OBJECT) == [text]


@pytest.mark.parametrize(
    ("template", "begin", "key"),
    [
        (None, "", "arguments"),
        (
            r"{{ '<tool_call>\n{\"name\": <name>, \"arguments\": <object>}\n</tool_call>' }}",
            "<tool_call>\n",
            "arguments",
        ),
        ("<tool_call>{{ call }}</tool_call>", "<tool_call>", "arguments"),
        ('{{ "[TOOL_CALLS] [" }}', "[TOOL_CALLS] ", "arguments"),
        ('{"name": name of it, "parameters": an object}{{ tools }}', "", "parameters"),
        ('{"name": {{ t.name }}, "description": {{ d }}, "parameters": {{ p }}}{{ tools }}', "", "arguments"),
    ],
)
def test_the_form_of_calls_is_that_of_the_template(template: str | None, begin: str, key: str) -> None:
    dialect = dialect_of(template)
    assert (dialect.begin, dialect.key) == (begin, key)
    assert dialect.is_list is (not begin.startswith("<") and key == "arguments")
