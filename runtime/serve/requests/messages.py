"""Chat messages: from the form of OpenAI's API to the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...text.tokenizer import Message
from ...text.tool_messages import arguments_of
from .fields import a_dict, a_list, text, unsupported_value, wrong

MAX_MESSAGES = 4096
CONTINUED = ("prefix", "partial")  # other APIs' fields of an assistant message that the answer continues


def message_list(name: str, value: object) -> list[Any]:
    messages: list[Any] = a_list(name, value)
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise wrong(name, f"a list of 1 to {MAX_MESSAGES} messages", messages)
    return messages


def read_messages(name: str, value: object) -> list[dict[str, Any]]:
    """The messages of a body. Raises Refused if they are invalid."""
    return [_message(f"{name}[{i}]", message) for i, message in enumerate(message_list(name, value))]


def _message(where: str, message: object) -> dict[str, Any]:
    fields = {name: value for name, value in a_dict(where, message).items() if value is not None}
    role = role_of(text(f"{where}.role", fields.get("role")))
    for name in CONTINUED:
        if fields.get(name, False) is not False:
            raise unsupported_value(
                where.partition("[")[0],
                f"{where}.{name}: an answer does not continue a message; remove it",
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
    """A text, or the joined texts of parts whose type is one of `kinds`. Raises Refused for other parts."""
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
