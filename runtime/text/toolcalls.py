"""Parses the tool calls in answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ..bundle.turns import ThinkingMarks
from .dialects import ARGUMENTS, Dialect

SPACE = " \t\r\n"
JSON = json.JSONDecoder(parse_constant=int)  # int raises for NaN and Infinity, which JSON lacks
KEYS = {"name", "id", "type", *ARGUMENTS}
Place = Literal["margin", "thinking", "text", "open", "object", "next"]
FIRST_KEY = re.compile(r'\{\s*"((?:[^"\\]|\\.)*)"')


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

    A call is an object {name, arguments}, alone or in a list, after the mark that opens calls; in some
    dialects also at the beginning of the answer. It is returned when it is complete. Everything else is text,
    except marks, brackets and separators around calls with their white space. An answer may begin after its
    `thinking`, in which there are no calls.
    """

    def __init__(self, dialect: Dialect, thinking: ThinkingMarks | None = None) -> None:
        self._dialect = dialect
        self._thinking = ("", "") if thinking is None else (thinking.open, thinking.close)
        # margin: at the beginning and after calls; open: a call must follow; next: after a call in a list
        self._place: Place = "margin"
        self._in_list = self._is_marked = self._may_close = False
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

    def finish(self, *, is_cut: bool = False) -> list[str | ToolCall]:
        """The held-back text, at the end of the answer. If the answer `is_cut` short, the beginning of a call
        is dropped.
        """
        held, self._held = self._held, ""
        said = held.strip(SPACE)
        is_begun = self._place not in ("margin", "text", "thinking") or len(said) > 1
        if (said or not self._calls) and not (is_cut and is_begun):
            self._add_text(held)
        return self._take_items()

    @property
    def answer(self) -> ToolAnswer:
        return ToolAnswer("".join(self._text), tuple(self._calls))

    def _step(self, character: str) -> None:
        self._held += character
        if self._place in ("text", "thinking"):
            self._search()
        elif self._place == "object":
            if self._object.ends_with(character):
                self._read()
            elif character == '"' and not self._is_marked and not _may_be_call(self._held):
                self._give_up(len(self._held))
        elif character in SPACE:
            pass
        elif self._place == "margin":
            self._begin()
        elif self._place == "open":
            args = self._dialect.args
            if args:
                if self._held.endswith(args + "{"):
                    self._begin_object()
                elif character == "{":
                    self._give_up(len(self._held))
            elif character == "{":
                self._begin_object()
            elif character == "[" and self._is_marked and not self._in_list:
                self._in_list = True
            else:
                self._give_up(len(self._held) - 1)
        elif character == ",":
            self._place = "open"
        elif character == "]":
            self._end_calls()
        else:
            self._give_up(0)

    def _begin(self) -> None:
        """Find out what begins at a margin: calls, the mark that closes the ones before, or text."""
        dialect, is_first = self._dialect, not self._calls
        is_separated = not (is_first or dialect.is_list or dialect.close)
        said = self._held.lstrip(SPACE + ";" if is_separated else SPACE)
        bracket = "[" if dialect.is_list else "{"
        if said == dialect.open:
            self._place, self._is_marked = "open", True
        elif self._may_close and said == dialect.close:
            self._may_close, self._held = False, ""
        elif is_first and said == self._thinking[0]:
            self._give_up(len(self._held), "thinking")
        elif any(mark.startswith(said) for mark in (dialect.open, self._thinking[0])) or (
            self._may_close and dialect.close.startswith(said)
        ):
            pass
        elif dialect.is_bare and said[0] == bracket and (is_first or is_separated):
            # What was held because it could be a mark is read again.
            rest, self._held = said[1:], self._held[: len(self._held) - len(said) + 1]
            self._is_marked = False
            if dialect.is_list:
                self._place, self._in_list = "open", True
            else:
                self._begin_object()
            for character in rest:
                self._step(character)
        else:
            self._give_up(0)

    def _search(self) -> None:
        """Return text until a mark opens, or thinking ends; a possible beginning of a mark is held back."""
        mark = "" if self._place == "thinking" else self._dialect.open
        end = "" if self._calls else self._thinking[1]
        while self._held and not mark.startswith(self._held) and not end.startswith(self._held):
            self._add_text(self._held[0])
            self._held = self._held[1:]
        if self._held and self._held == mark:
            self._place, self._is_marked = "open", True
        elif self._held and self._held == end:
            self._give_up(len(end), "margin")

    def _begin_object(self) -> None:
        self._place, self._object = "object", _Object()
        self._object.ends_with("{")

    def _read(self) -> None:
        """Return a complete object, if it is a call."""
        is_bare, args = not self._is_marked and not self._in_list, self._dialect.args
        head, brace, rest = self._held.partition("{")
        if args:
            name = head.rpartition(self._dialect.open)[2].removesuffix(args).partition("[CALL_ID]")[0].strip()
            call = _call(f'{{"name": {json.dumps(name)}, "arguments": {brace}{rest}}}')
        else:
            call = _call(brace + rest, needs_arguments=is_bare)
        if call is None:
            self._give_up(len(self._held))
            return
        self._calls.append(call)
        self._items.append(call)
        if self._in_list:
            self._place, self._held = "next", ""
        else:
            self._end_calls()

    def _end_calls(self) -> None:
        self._place, self._held, self._in_list = "margin", "", False
        self._may_close = bool(self._dialect.close)

    def _give_up(self, count: int, place: Place = "text") -> None:
        """There is no call: the first `count` held characters are text, and the others are read again."""
        held, self._held, self._place, self._in_list = self._held, "", place, False
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


def _may_be_call(text: str) -> bool:
    """Whether the first key of an object is one that calls have."""
    key = FIRST_KEY.match(text, text.index("{"))
    return key is None or key[1] in KEYS


def _call(text: str, *, needs_arguments: bool = False) -> ToolCall | None:
    """The call in an object's text, or None. Its keys are unique and known, `name` is a text, and the
    arguments are an object, or a text with one.
    """
    try:
        JSON.decode(text)
        members = list(_members(text))
        values = {key: (value, raw) for key, value, raw in members}
        name, _ = values["name"]
        given = [values[key] for key in ARGUMENTS if key in values]
        if len(values) < len(members) or not values.keys() <= KEYS or len(given) > 1:
            return None
        arguments, raw = given[0] if given else (None, "")
        if isinstance(arguments, str):
            raw = arguments.strip(SPACE)
            arguments = JSON.decode(raw) if raw else None
        (name + raw).encode()  # raises for a lone surrogate
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None
    if arguments is None and not (needs_arguments and not given):
        return ToolCall(name, "{}")
    return ToolCall(name, raw) if isinstance(arguments, dict) else None


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
