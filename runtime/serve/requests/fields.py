"""Fields of request bodies: tables of readers, and chat messages in the form that templates expect."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...rules import is_integer
from ...text.dialects import Message, arguments_of
from ..api_error import ApiError

FieldParser = Callable[[str, Any], Any]
"""Checks the value of a field by its name, and returns it as the server uses it. None: it has no effect."""


class Several(dict[str, Any]):
    """Values for several names, from one field."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a body. `into`: the name of its value, if it differs from the field's."""

    read: FieldParser
    into: str | None = None
    is_needed: bool = False


Table = Mapping[str, Field]


def read_fields(body: Mapping[str, Any], table: Table) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a body's fields by their names, and the field of each name. A null field counts as
    absent. If two fields give the same value, the later one of the table counts.

    Raises ApiError for an unknown or missing field, and for an invalid value.
    """
    body = {name: value for name, value in body.items() if value is not None}
    if unknown := [name[:60] for name in body if name not in table]:
        raise ApiError(400, f"unknown field {unknown[0]!r}; remove it, or correct its name", param=unknown[0])
    values: dict[str, Any] = {}
    names = {field.into or name: name for name, field in table.items()}
    for name, field in table.items():
        if name in body:
            value = field.read(name, body[name])
            several = value if isinstance(value, Several) else {field.into or name: value}
            for into, content in several.items():
                if content is not None:
                    values[into], names[into] = content, name
        elif field.is_needed:
            raise ApiError(400, f"{name} is missing", param=name)
    return values, names


# --- readers ---


def setting(_name: str, value: Any) -> Any:
    """A field of GenerationConfig, which checks it."""
    return value


def of_type(kind: type, words: str) -> FieldParser:
    def read(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise wrong(name, words, value)
        return value

    return read


text = of_type(str, "a text")
flag = of_type(bool, "true or false")
a_dict = of_type(dict, "an object")
a_list = of_type(list, "a list")


def integer(low: int, high: int | None = None) -> FieldParser:
    """A reader of integers of `low` to `high`."""
    limits = f" of {low} or more" if high is None else f" of {low} to {high}"

    def read(name: str, value: Any) -> int:
        if not is_integer(value, low) or (high is not None and value > high):
            raise wrong(name, f"an integer{limits}", value)
        return value

    return read


def one_of(*known: str) -> FieldParser:
    def read(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            raise wrong(name, ", ".join(map(json.dumps, known)), value)
        return value

    return read


def ignored(_name: str, _value: Any) -> None:
    """A field that does not change the answer."""


def unsupported(*neutral: Any) -> FieldParser:
    """A reader of a field that would change the answer, unless it has one of the values `neutral`."""

    def read(name: str, value: Any) -> None:
        if value not in neutral:
            note = f" (except {json.dumps(neutral[0])})" if neutral else ""
            reason = f"is not supported{note} and would change the answer; remove it"
            raise unsupported_value(name, f"{name} {reason}")

    return read


def read_fields_in(name: str, value: Any, table: Table) -> tuple[dict[str, Any], dict[str, str]]:
    """`read_fields` of the object in the field `name`, which is the param of errors."""
    fields = a_dict(name, value)
    try:
        return read_fields(fields, table)
    except ApiError as refusal:
        raise ApiError(400, f"{name}: {refusal}", param=name, code=refusal.code) from None


def inner(table: Table) -> FieldParser:
    """A reader of an object whose fields are those of `table`."""
    return lambda name, value: Several(read_fields_in(name, value, table)[0])


def unsupported_value(name: str, message: str) -> ApiError:
    return ApiError(400, message, param=name, code="unsupported_parameter")


def wrong(name: str, what: str, value: object) -> ApiError:
    """`name` is a field, or a place in it: the param of an error is the field."""
    return ApiError(400, f"{name} must be {what}, not {shown(value)}", param=name.partition("[")[0])


def shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return repr(value)[:80]


MAX_MESSAGES = 4096
CONTINUED = ("prefix", "partial")  # other APIs' fields of an assistant message that the answer continues


def message_list(name: str, value: object) -> list[Any]:
    messages: list[Any] = a_list(name, value)
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise wrong(name, f"a list of 1 to {MAX_MESSAGES} messages", messages)
    return messages


def read_messages(name: str, value: object) -> list[dict[str, Any]]:
    """The messages of a body. Raises ApiError if they are invalid."""
    return [_message(f"{name}[{i}]", message) for i, message in enumerate(message_list(name, value))]


def _message(where: str, message: object) -> dict[str, Any]:
    fields = {name: value for name, value in a_dict(where, message).items() if value is not None}
    role = role_of(text(f"{where}.role", fields.get("role")))
    for name in CONTINUED:
        if fields.get(name, False) is not False:
            raise unsupported_value(
                where.partition("[")[0], f"{where}.{name}: continuing a message is not supported; remove it"
            )
    # An assistant message may have only calls, a refusal or reasoning.
    content = fields.get("content", "" if role == "assistant" else None)
    if not isinstance(content, str | list):
        raise wrong(f"{where}.content", "a text or a list of parts", content)
    message = {**fields, "role": role, "content": content}
    if "tool_calls" in fields:
        calls = a_list(f"{where}.tool_calls", fields["tool_calls"])
        message["tool_calls"] = [_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    return message


def role_of(role: str) -> str:
    """OpenAI's `developer` is its newer name for `system`, the role that chat templates know."""
    return "system" if role == "developer" else role


def _call(where: str, value: object) -> dict[str, Any]:
    """A call whose arguments are JSON text; some clients send an object, or null for none."""
    call = a_dict(where, value)
    function = a_dict(f"{where}.function", call.get("function"))
    name, arguments = text(f"{where}.function.name", function.get("name")), function.get("arguments")
    if isinstance(arguments, dict | None):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    text(f"{where}.function.arguments", arguments)
    return {**call, "function": {**function, "name": name, "arguments": arguments}}


def joined_text(where: str, content: object, kinds: Sequence[str]) -> str:
    """A text, or the joined texts of parts whose type is one of `kinds`. Raises ApiError for other parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, "a text or a list of parts", content)
    texts = []
    for i, part in enumerate(content):
        fields = part if isinstance(part, dict) else {}
        kind, text = fields.get("type"), fields.get("text")
        if kind not in kinds or not isinstance(text, str):
            raise wrong(f"{where}[{i}]", f'text ({{"type": "{kinds[0]}", "text": ...}})', kind)
        texts.append(text)
    return "".join(texts)


def as_template(messages: list[dict[str, Any]]) -> list[Message]:
    """Messages for the template: the arguments of calls are objects."""
    return [_with_objects(message) if message.get("tool_calls") else message for message in messages]


def _with_objects(message: Mapping[str, Any]) -> Message:
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [
        {
            **call,
            "type": "function",
            "function": {"name": f["name"], "arguments": arguments_of(f["arguments"])},
        }
        for call, f in zip(message["tool_calls"], functions, strict=True)
    ]
    return {**message, "tool_calls": calls}
