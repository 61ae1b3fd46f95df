"""Tools: how a prompt lists them, the schema of their calls, and parsing calls in answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Dialect = Literal["list", "tags"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
SPACE = " \t\r\n"
JSON = json.JSONDecoder(parse_constant=int)  # int raises for NaN and Infinity, which JSON lacks


def dialect_of(chat_template: str | None) -> Dialect:
    """How a checkpoint writes calls: in tags if its template has them, else as one JSON list."""
    return "tags" if chat_template is not None and OPEN in chat_template else "list"


def system_text(tools: Sequence[dict[str, Any]]) -> str:
    """The system message for templates that take no tools: one function a line, as JSON."""
    lines = [json.dumps(_function(tool), ensure_ascii=False) for tool in tools]
    return "\n".join(
        [
            "Reply with tool calls: a JSON list of objects with the keys name and arguments.",
            "The tools are:",
            *lines,
        ]
    )


def parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments: an object, without other properties unless it says otherwise."""
    schema: dict[str, Any] = _function(tool).get("parameters") or {}
    return {"type": "object", "additionalProperties": False} | schema


def tagged(tool: dict[str, Any], item: str, key: str) -> tuple[str, str]:
    """The texts before and after the arguments of a call in tags, with these separators of JSON."""
    name = json.dumps(_function(tool)["name"], ensure_ascii=False)
    return f'{OPEN}\n{{"name"{key}{name}{item}"arguments"{key}', f"}}\n{CLOSE}"


def list_schema(tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The schema of an answer that is one or more calls: a list of {name, arguments}."""
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
                "properties": {"name": {"const": _function(tool)["name"]}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": items}}
    return schema | ({"$defs": definitions} if definitions else {})


def _function(tool: dict[str, Any]) -> dict[str, Any]:
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


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `arguments` is the JSON text of an object, as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """An answer read back: the text outside of calls, and the calls."""

    text: str
    calls: tuple[ToolCall, ...]


class ToolStream:
    """Parses the calls of a growing answer, character by character.

    A call is an object {name, arguments} after a tag, or in a list at the beginning of the answer. It is
    returned when it is complete. Everything else is text, except tags, brackets and commas around calls with
    their white space.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._place: Literal["start", "text", "open", "object", "close", "end"] = (
            "start" if dialect == "list" else "text"
        )
        self._held = ""  # may belong to a call
        self._object = _Object()
        self._items: list[str | ToolCall] = []
        self._text: list[str] = []
        self._calls: list[ToolCall] = []

    def push(self, text: str) -> list[str | ToolCall]:
        """The calls and joined texts that `text` adds."""
        for character in text:
            self._step(character)
        return self._take_items()

    def finish(self) -> list[str | ToolCall]:
        """The held-back text, at the end of the answer."""
        if self._place not in ("close", "end") or self._held.strip(SPACE):
            self._add_text(self._held)
        self._held = ""
        return self._take_items()

    @property
    def answer(self) -> ToolAnswer:
        return ToolAnswer("".join(self._text), tuple(self._calls))

    def _step(self, character: str) -> None:
        if self._place == "text" and self._dialect == "list":
            self._add_text(character)
            return
        self._held += character
        if self._place == "text":
            self._search()
        elif self._place == "object":
            if self._object.ends_with(character):
                self._read()
        elif character in SPACE:
            pass
        elif self._place == "open" and character == "{":
            self._place, self._object = "object", _Object()
            self._object.ends_with(character)
        elif self._place == "open":
            self._give_up(len(self._held) - 1)
        elif self._dialect == "list":
            after = {("start", "["): "open", ("close", ","): "open", ("close", "]"): "end"}
            if (place := after.get((self._place, character))) is None:
                self._give_up(0)
                return
            self._place = place  # type: ignore[assignment]
            self._held = "" if place == "end" else self._held
        elif not CLOSE.startswith(self._held.lstrip(SPACE)):
            self._give_up(0)
        elif self._held.endswith(CLOSE):
            self._place, self._held = "text", ""

    def _search(self) -> None:
        """Return text until a tag opens; a possible beginning of a tag is held back."""
        while self._held and not OPEN.startswith(self._held):
            self._add_text(self._held[0])
            self._held = self._held[1:]
        if self._held == OPEN:
            self._place = "open"

    def _read(self) -> None:
        """Return a complete object, if it is a call."""
        if (call := _call(self._held[self._held.index("{") :])) is None:
            self._give_up(len(self._held))
            return
        self._calls.append(call)
        self._items.append(call)
        self._place, self._held = "close", ""

    def _give_up(self, count: int) -> None:
        """There is no call: the first `count` held characters are text, and the others are read again."""
        held, self._held, self._place = self._held, "", "text"
        self._add_text(held[:count])
        for character in held[count:]:
            self._step(character)

    def _add_text(self, text: str) -> None:
        if not text:
            return
        self._text.append(text)
        if self._items and isinstance(last := self._items[-1], str):
            self._items[-1] = last + text
        else:
            self._items.append(text)

    def _take_items(self) -> list[str | ToolCall]:
        items, self._items = self._items, []
        return items


class _Object:
    """Finds the end of a JSON object."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def ends_with(self, character: str) -> bool:
        if self._in_string:
            self._in_string = self._is_escaped or character != '"'
            self._is_escaped = character == "\\" and not self._is_escaped
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        return self._depth == 0


def _call(text: str) -> ToolCall | None:
    """The call in an object's text, or None: keys are unique, `name` is text, arguments are an object."""
    try:
        JSON.decode(text)
        members = list(_members(text))
        values = {key: (value, raw) for key, value, raw in members}
        name, _ = values["name"]
        name.encode()  # raises for a lone surrogate
    except (ValueError, KeyError, AttributeError, RecursionError):
        return None
    arguments, raw = values.get("arguments", ({}, "{}"))
    return ToolCall(name, raw) if isinstance(arguments, dict) and len(values) == len(members) else None


def _members(text: str) -> Iterator[tuple[str, Any, str]]:
    """Keys, values and the values' text of a valid JSON object."""
    at = _past(text, 1, SPACE)
    while text[at] != "}":
        key, at = JSON.raw_decode(text, at)
        start = _past(text, at, SPACE + ":")
        value, end = JSON.raw_decode(text, start)
        yield key, value, text[start:end]
        at = _past(text, end, SPACE + ",")


def _past(text: str, at: int, characters: str) -> int:
    while text[at] in characters:
        at += 1
    return at
