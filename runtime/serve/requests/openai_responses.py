"""The fields of /v1/responses (OpenAI's Responses API, without state), read into a chat."""

from __future__ import annotations

from typing import Any

from .completions import (
    SHARED,
    function_tool,
    no_effect,
    reasoning_effort,
    refusing,
    settings,
    text_format,
    tool_choice,
)
from .fields import (
    Field,
    Several,
    Table,
    a_list,
    flag,
    inner,
    integer,
    joined_text,
    message_list,
    role_of,
    shown,
    text,
    unsupported_value,
    wrong,
)

LOGPROBS = "message.output_text.logprobs"
TEXTS = ("input_text", "output_text", "text")


def read_input(name: str, value: Any) -> list[dict[str, Any]]:
    """Messages of a chat. Calls join the assistant message before them; a developer message is system's."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(message_list(name, value)):
        _add_item(messages, f"{name}[{i}]", item)
    if not messages:
        raise wrong(name, "a text or a list with a message", value)
    return messages


def _add_item(messages: list[dict[str, Any]], where: str, item: Any) -> None:
    fields = item if isinstance(item, dict) else {}
    kind = fields.get("type", "message")
    last = messages[-1] if messages else {}
    if kind == "reasoning":
        return
    if kind == "message" and isinstance(fields.get("role"), str):
        role = role_of(fields["role"])
        content = joined_text(f"{where}.content", fields.get("content"), TEXTS)
        if role == "system" and last.get("role") == "system":  # templates take one
            last["content"] += f"\n\n{content}"
        else:
            messages.append({"role": role, "content": content})
    elif kind == "function_call" and _has_texts(fields, "call_id", "name", "arguments"):
        if last.get("role") != "assistant":
            last = {"role": "assistant", "content": ""}
            messages.append(last)
        function = {"name": fields["name"], "arguments": fields["arguments"]}
        call = {"id": fields["call_id"], "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output" and _has_texts(fields, "call_id"):
        content = joined_text(f"{where}.output", fields.get("output"), TEXTS)
        messages.append({"role": "tool", "tool_call_id": fields["call_id"], "content": content})
    elif kind == "item_reference":
        reason = "refers to a stored item, and nothing is stored; send the item (some clients: store: false)"
        raise unsupported_value(where.partition("[")[0], f"{where} {reason}")
    else:
        forms = (
            "a message {role, content}, a function_call {call_id, name, arguments}, a function_call_output"
            " {call_id, output} or a reasoning item"
        )
        raise wrong(where, forms, kind)


def _has_texts(fields: dict[str, Any], *names: str) -> bool:
    return all(isinstance(fields.get(name), str) for name in names)


def _tools(name: str, value: Any) -> list[Any]:
    """Functions in the form of a chat: {"type": "function", "function": {...}}."""
    tools = []
    for i, tool in enumerate(a_list(name, value)):
        fields = function_tool(f"{name}[{i}]", tool)
        function = {
            key: fields[key] for key in ("name", "description", "parameters") if fields.get(key) is not None
        }
        tools.append({"type": "function", "function": function})
    return tools


def _include(name: str, value: Any) -> Several:
    """There is no encrypted reasoning, so a request for it has no effect."""
    known = ("reasoning.encrypted_content", LOGPROBS)
    if others := [part for part in a_list(name, value) if part not in known]:
        raise unsupported_value(name, f"{name}: {shown(others[0])} is not supported")
    return Several(logprobs=0 if LOGPROBS in value else None)


_reasoning = inner(
    {"effort": Field(reasoning_effort, "thinking"), **no_effect("summary", "generate_summary")}
)
_text = inner({"format": Field(text_format, "schema"), **no_effect("verbosity")})

RESPONSES: Table = {
    **SHARED,
    "input": Field(read_input, "messages", is_needed=True),
    "instructions": Field(text, "system"),
    "max_output_tokens": Field(integer(1), "max_new_tokens"),
    "text": Field(_text),
    "tools": Field(_tools),
    "tool_choice": Field(tool_choice),
    "parallel_tool_calls": Field(flag),
    "include": Field(_include),
    "reasoning": Field(_reasoning),
    **settings("top_logprobs"),
    **no_effect(
        "store", "stream_options", "max_tool_calls", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "access_programs", "background_options",
    ),
    **refusing(
        previous_response_id=(), conversation=(), background=(False,), truncation=("disabled",),
        prompt=(), context_management=(), moderation=(), image=(),
    ),
}  # fmt: skip
