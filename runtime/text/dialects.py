"""The formats of tool calls, and the text of tools, calls and results for templates without tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..bundle.manifest import TextInfo

ARGUMENTS = ("arguments", "parameters", "args")  # names that models give the arguments of a call
# A call as templates show it to the model: {"name": ..., "arguments": ...}
SHOWN = re.compile(
    r'(?P<list>\[\s*)?\{\s*\\?"name\\?"\s*:(?:[^{}+~]|\{\{.*?\}\})*?'
    r'\\?"(?P<key>arguments|parameters|args)\\?"\s*:'
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a checkpoint writes calls.

    open, close: the texts before and after a call, or before and after the list of calls
    is_list: calls are one JSON list; otherwise each is an object
    is_bare: an answer may begin with the JSON, without `open`
    writes_open: whether a grammar asks for `open`
    gap: the white space between these texts and the JSON
    key: the name of a call's arguments
    args: the text between name and arguments, if a call is not an object but `open`, name, `args`, arguments
    """

    open: str = ""
    close: str = ""
    is_list: bool = False
    is_bare: bool = False
    writes_open: bool = True
    gap: str = ""
    key: str = "arguments"
    args: str = ""

    @property
    def begin(self) -> str:
        """The text that a grammar requires before the JSON."""
        return self.open + self.gap if self.open and self.writes_open else ""

    @property
    def end(self) -> str:
        """The text that a grammar requires after the JSON."""
        return self.gap + self.close if self.close else ""

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that may be tokens of their own."""
        return tuple(mark for mark in (self.open, self.close, self.args) if mark)

    @property
    def repeats(self) -> bool:
        """Whether calls may follow each other."""
        return not self.is_list and bool(self.close or self.args)


LIST = Dialect(is_list=True, is_bare=True)
TAGS = Dialect("<tool_call>", "</tool_call>", gap="\n")  # Qwen, Hermes, SmolLM3, Granite 4
OBJECT = Dialect("<|python_tag|>", is_bare=True, writes_open=False)  # Llama 3
# By the first mark that the chat template has.
MARKED = (
    TAGS,
    Dialect("[TOOL_CALLS]", args="[ARGS]"),  # Ministral 3
    Dialect("[TOOL_CALLS]", is_list=True, is_bare=True),  # Mistral
    Dialect("<|tool_call|>", "<|/tool_call|>", is_list=True, is_bare=True),  # Granite 3
)


def dialect_in(text: TextInfo | None) -> Dialect:
    """How the checkpoint of a bundle writes calls."""
    return dialect_of(None if text is None else text.tool_template or text.chat_template)


def dialect_of(chat_template: str | None) -> Dialect:
    """How a checkpoint writes calls: with the marks of its template, as the object that the template shows,
    or else as one JSON list.
    """
    source = (chat_template or "").replace("\\n", "\n")
    shown = [match for match in SHOWN.finditer(source) if "description" not in match[0]]
    keys = {match["key"]: match for match in reversed(shown)}
    key = next((key for key in ARGUMENTS if key in keys), "arguments")
    for dialect in MARKED:
        if dialect.open in source and dialect.args in source:
            gap = re.search(re.escape(dialect.open) + r"(\s*)(?=[\[{\"'])", source)
            close = dialect.close if dialect.close in source else ""
            return replace(dialect, close=close, key=key, gap=dialect.gap if gap is None else gap[1])
    if shown and not any(match["list"] for match in shown) and re.search(r"\btools\b", source):
        return replace(OBJECT, key=key)
    return LIST


def parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments: an object, without other properties unless it says otherwise."""
    schema: dict[str, Any] = function_of(tool).get("parameters") or {}
    return {"type": "object", "additionalProperties": False} | schema


def call_forms(tools: Sequence[dict[str, Any]], dialect: Dialect) -> list[tuple[str, dict[str, Any], str]]:
    """The forms of a call, or of the list of calls: a text, the schema of the JSON after it, and a text."""
    if dialect.args:
        return [
            (dialect.open + function_of(tool)["name"] + dialect.args, parameters(tool), "") for tool in tools
        ]
    return [(dialect.begin, calls_schema(tools, dialect), dialect.end)]


def calls_schema(tools: Sequence[dict[str, Any]], dialect: Dialect) -> dict[str, Any]:
    """The schema of the JSON of calls: a list of at least one object, or one object."""
    items, definitions = [], {}
    for i, tool in enumerate(tools):
        arguments: dict[str, Any] = parameters(tool)
        if any(True for _ in _references(arguments)):
            # References start at the root of the whole schema, to which the parameters move.
            definitions[f"tool{i}"] = _moved(arguments, f"#/$defs/tool{i}")
            arguments = {"$ref": f"#/$defs/tool{i}"}
        items.append(
            {
                "type": "object",
                "properties": {"name": {"const": function_of(tool)["name"]}, dialect.key: arguments},
                "required": ["name", dialect.key],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"anyOf": items}
    if dialect.is_list:
        schema = {"type": "array", "minItems": 1, "items": schema}
    return schema | ({"$defs": definitions} if definitions else {})


def function_of(tool: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = tool["function"]
    return function


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def _moved(value: Any, root: str) -> Any:
    """A schema whose local references start at `root`."""
    if isinstance(value, list):
        return [_moved(inner, root) for inner in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(inner, root) for key, inner in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved


Message = Mapping[str, Any]
RESULT_ROLES = ("tool", "function", "ipython")


def with_tools(messages: Sequence[Message], tools: Sequence[Any], *, has_system: bool) -> list[Message]:
    """Messages whose system message, or else first user message, lists the tools: one function a line."""
    text = "\n".join(
        [
            "Reply with tool calls: a JSON list of objects with the keys name and arguments.",
            "The tools are:",
            *(json.dumps(function_of(tool), ensure_ascii=False) for tool in tools),
        ]
    )
    first, rest = messages[0], messages[1:]
    if not has_system:
        at = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
        if at is not None:
            user = {**messages[at], "content": f"{text}\n\n{messages[at]['content']}"}
            return [*messages[:at], user, *messages[at + 1 :]]
        return [{"role": "user", "content": text}, *messages]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]


def calls_as_text(messages: Sequence[Message], dialect: Dialect) -> list[Message]:
    """Messages whose calls are a part of their text, in the form in which the model writes them."""
    return [
        {
            **{name: value for name, value in message.items() if name != "tool_calls"},
            "content": "\n".join(
                piece for piece in (message["content"], _written(message["tool_calls"], dialect)) if piece
            ),
        }
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _written(calls: Sequence[Mapping[str, Any]], dialect: Dialect) -> str:
    functions = [
        (call["function"]["name"], arguments_of(call["function"].get("arguments", {}))) for call in calls
    ]
    if dialect.args:
        return "".join(f"{dialect.open}{name}{dialect.args}{_json(values)}" for name, values in functions)
    objects = [_json({"name": name, dialect.key: values}) for name, values in functions]
    pieces = [f"[{', '.join(objects)}]"] if dialect.is_list else objects
    return "\n".join(dialect.begin + piece + dialect.end for piece in pieces)


def results_as_user(messages: Sequence[Message], original: Sequence[Message]) -> list[Message]:
    """Messages with the results of calls, and what the user says next, in one user message: one result a
    line, as JSON. `original`: the same messages with their calls, which have the names.
    """
    names = {call.get("id"): call["function"]["name"] for m in original for call in m.get("tool_calls") or []}
    made: list[Message] = []
    is_result = is_open = False  # the last message has results; another one may join it
    for message in messages:
        role, content = message["role"], message["content"]
        was_result, is_result = is_result, role in RESULT_ROLES
        if is_result:
            name = message.get("name") or names.get(message.get("tool_call_id"))
            content = _json(({} if name is None else {"name": name}) | {"result": content})
            content = content if was_result else f"The results are:\n{content}"
        joins = is_open and (is_result or role == "user")
        if joins:
            gap = "\n" if was_result and is_result else "\n\n"
            made[-1] = {**made[-1], "content": f"{made[-1]['content']}{gap}{content}"}
        else:
            made.append({"role": "user", "content": content} if is_result else message)
        is_open = is_result or (joins and role == "user")
    return made


def arguments_of(arguments: Any) -> Any:
    """The arguments of a call as an object; text that is not JSON stays text."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
