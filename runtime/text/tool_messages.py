"""Tools, calls and results as text, for chat templates that do not take them (docs/structured.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .dialects import Dialect, function_of

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
