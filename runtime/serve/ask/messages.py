"""Chat messages: from the form of OpenAI's API to the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...text.tokenizer import Message
from ...text.toolcalls import Dialect
from ..refusals import Refused
from .fields import shown

MOST_MESSAGES = 4096


def read_messages(_name: str, value: object) -> list[dict[str, Any]]:
    """The messages of a body. Raises Refused if they are invalid."""
    if not isinstance(value, list) or not value:
        raise _wrong(f"messages must be a list of at least one message, not {shown(value) if value else []}")
    if len(value) > MOST_MESSAGES:
        raise _wrong(f"{len(value)} messages are too many; at most {MOST_MESSAGES} are allowed")
    return [_message(i, message) for i, message in enumerate(value)]


def _message(i: int, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _wrong(f"messages[{i}] must be an object, not {shown(message)}")
    role = message.get("role")
    if not isinstance(role, str):
        raise _wrong(f"messages[{i}].role must be a text, not {shown(role)}")
    fields = {name: value for name, value in message.items() if value is not None}
    content = fields.get("content", "" if "tool_calls" in fields else None)
    if not isinstance(content, str | list):
        raise _wrong(f"messages[{i}].content must be a text or a list of parts, not {shown(content)}")
    calls = fields.get("tool_calls", [])
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        raise _wrong(
            f"messages[{i}].tool_calls must be a list of {{id, type, function: {{name, arguments}}}}"
        )
    return {**fields, "content": content}


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments", "{}"), str)
    )


def joined_text(where: str, content: object, kinds: Sequence[str], param: str) -> str:
    """A text, or the joined texts of parts whose type is one of `kinds`. Raises Refused for other parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(400, f"{where} must be a text or a list of parts, not {shown(content)}", param=param)
    texts = []
    for i, part in enumerate(content):
        fields = part if isinstance(part, dict) else {}
        kind, text = fields.get("type"), fields.get("text")
        if kind not in kinds or not isinstance(text, str):
            raise Refused(
                400,
                f'{where}[{i}]: only text is supported ({{"type": "{kinds[0]}", "text": ...}}), not'
                f" {shown(kind)}",
                param=param,
            )
        texts.append(text)
    return "".join(texts)


def as_template(messages: list[dict[str, Any]], dialect: Dialect) -> list[Message]:
    """Messages for the template: calls with their arguments as objects, or in dialect `list` as the text that
    the model would have written.
    """
    return [_with_calls(message, dialect) if message.get("tool_calls") else message for message in messages]


def _with_calls(message: Mapping[str, Any], dialect: Dialect) -> Message:
    calls = [
        {"name": call["function"]["name"], "arguments": _object(call["function"].get("arguments", "{}"))}
        for call in message["tool_calls"]
    ]
    if dialect == "tags":
        return {**message, "tool_calls": [{"type": "function", "function": call} for call in calls]}
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return others | {"content": json.dumps(calls, ensure_ascii=False)}


def _object(arguments: str) -> Any:
    """The arguments of a call; text that is not JSON stays text."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _wrong(message: str) -> Refused:
    return Refused(400, message, param="messages")
