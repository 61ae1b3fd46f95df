"""Tools: what a model is told of them, the schema of their calls, and calls read back from an answer.

Knows two ways to write calls, and neither grammar nor tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Dialect = Literal["list", "tags"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
SPACE = " \t\r\n"


def dialect_of(chat_template: str | None) -> Dialect:
    """How a checkpoint writes calls: in tags between text if its template says so, else as one JSON list."""
    return "tags" if chat_template is not None and OPEN in chat_template else "list"


def system_text(tools: Sequence[dict[str, Any]]) -> str:
    """The system message where a template takes no tools: one function a line, as JSON."""
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
    own: dict[str, Any] = _function(tool).get("parameters") or {}
    return {"type": "object", "additionalProperties": False} | own


def list_schema(tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The schema of an answer that is one or more calls: a list of {name, arguments}."""
    items, definitions = [], {}
    for i, tool in enumerate(tools):
        arguments: dict[str, Any] = parameters(tool)
        if any(True for _ in _references(arguments)):
            # A reference counts from the root of the whole schema: the parameters become a part of it.
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
    """A schema whose local references count from `root`."""
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
    """One call. `arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Delta:
    """What a piece of an answer adds: text outside of calls; to call `index` its name, or more arguments."""

    text: str = ""
    index: int | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """An answer read back: the text outside of calls, and the calls that are whole."""

    text: str
    calls: tuple[ToolCall, ...]


class ToolStream:
    """Reads calls from an answer that grows. Works by character: how the answer is cut changes nothing."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._held = ""  # may turn out to open a call or a list
        self._within: _Call | None = None
        self._place: Literal["before", "text", "list", "tail"] = "before" if dialect == "list" else "text"
        self._deltas: list[Delta] = []
        self._text: list[str] = []
        self._calls: list[ToolCall] = []
        self._num_begun = 0

    def push(self, text: str) -> list[Delta]:
        """What `text` adds, neighbours of one kind joined."""
        for character in text:
            self._step(character)
        return self._taken()

    def finish(self) -> list[Delta]:
        """What was held back, now that nothing follows."""
        if self._within is None and self._place in ("before", "text"):
            self._say(self._held)
            self._held = ""
        return self._taken()

    @property
    def answer(self) -> ToolAnswer:
        return ToolAnswer("".join(self._text), tuple(self._calls))

    def _step(self, character: str) -> None:
        if self._within is not None:
            self._read(self._within, character)
        elif self._place == "before":
            self._held += character
            if character == "[":
                self._place, self._held = "list", ""
            elif character not in SPACE:
                self._place = "text"
                self._say(self._held)
                self._held = ""
        elif self._place == "text":
            if self._dialect == "list":
                self._say(character)
            else:
                self._search(character)
        elif character == "{":  # in a list or behind a tag
            self._within = _Call()
            self._read(self._within, character)
        elif character == "]" and self._place == "list":
            self._place = "tail"
        elif self._place == "tail" and self._dialect == "tags":
            self._held += character
            if self._held.lstrip(SPACE) == CLOSE:
                self._held, self._place = "", "text"

    def _search(self, character: str) -> None:
        """Text until a tag opens; what may be the beginning of one is held back."""
        self._held += character
        while self._held and not OPEN.startswith(self._held):
            self._say(self._held[0])
            self._held = self._held[1:]
        if self._held == OPEN:
            self._held, self._place = "", "tail"

    def _read(self, call: _Call, character: str) -> None:
        name, arguments = call.push(character)
        if name is not None:
            self._num_begun += 1
            self._deltas.append(Delta(index=self._num_begun - 1, name=name))
        if arguments:
            self._deltas.append(Delta(index=self._num_begun - 1, arguments=arguments))
        if call.is_over:
            if call.name is not None:
                self._calls.append(ToolCall(call.name, call.arguments or "{}"))
            self._within = None

    def _say(self, text: str) -> None:
        if text:
            self._text.append(text)
            self._deltas.append(Delta(text=text))

    def _taken(self) -> list[Delta]:
        taken, self._deltas = self._deltas, []
        return joined(taken)


class _Call:
    """One JSON object {name, arguments} that is read character by character; other keys are passed over."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments = ""
        self.is_over = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None  # of the value that is being read
        self._raw = ""  # of the key or value so far

    def push(self, character: str) -> tuple[str | None, str]:
        """The name, when it is known, and more of the arguments; they wait for the name."""
        had_name = self.name
        said = self._step(character)
        self.arguments += said
        if self.name is not None and had_name is None:
            return self.name, self.arguments
        return None, said if self.name is not None else ""

    def _step(self, character: str) -> str:
        """More of the arguments."""
        inside = self._in_string
        if inside:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
            if self._depth == 1:
                return ""
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_of_value()
                self.is_over = True
                return ""
        elif self._depth == 1 and character == ":" and self._key is None:
            self._key, self._raw = _string(self._raw), ""
            return ""
        elif self._depth == 1 and character == ",":
            self._end_of_value()
            return ""
        if not inside and character in SPACE and self._depth == 1:
            return ""  # around a key or a value
        self._raw += character
        return character if self._key == "arguments" else ""

    def _end_of_value(self) -> None:
        if self._key == "name":
            self.name = _string(self._raw)
        self._key, self._raw = None, ""


def _string(raw: str) -> str:
    """The text of a JSON string; what is none stands for itself."""
    try:
        value = json.loads(raw)
    except ValueError:
        return raw
    return value if isinstance(value, str) else raw


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """Neighbours that say more of the same as one."""
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        if last is not None and delta.name is None and last.index == delta.index:
            found[-1] = Delta(last.text + delta.text, last.index, last.name, last.arguments + delta.arguments)
        else:
            found.append(delta)
    return found


def parse(text: str, dialect: Dialect) -> ToolAnswer:
    """The calls of a whole answer."""
    stream = ToolStream(dialect)
    stream.push(text)
    stream.finish()
    return stream.answer
