"""The fields of /v1/messages (Anthropic's Messages API), read into a chat."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, NoReturn

from ..api_error import ApiError
from .completions import SHARED, no_effect, refusing, text_format
from .fields import (
    Field,
    Several,
    Table,
    a_dict,
    a_list,
    inner,
    integer,
    joined_text,
    message_list,
    one_of,
    setting,
    shown,
    unsupported_value,
    wrong,
)

TEXTS = ("text",)
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def read_turns(name: str, value: Any) -> list[dict[str, Any]]:
    """Messages of the form of a chat: results of tools become messages of their own, before the text that
    they came with. The model begins a message of its own, so the last one cannot be the assistant's.
    """
    messages: list[dict[str, Any]] = []
    for i, turn in enumerate(message_list(name, value)):
        fields = a_dict(f"{name}[{i}]", turn)
        role = one_of("user", "assistant")(f"{name}[{i}].role", fields.get("role"))
        messages += _turn(f"{name}[{i}].content", role, fields.get("content"))
    if messages[-1]["role"] == "assistant":
        reason = "must end with a user message; continuing an assistant message is not supported"
        raise unsupported_value(name, f"{name} {reason}")
    return messages


def _turn(where: str, role: str, content: Any) -> list[dict[str, Any]]:
    """One message, with the results of tools before it."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else a_list(where, content)
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    said: list[Any] = []
    for i, block in enumerate(blocks):
        fields = block if isinstance(block, dict) else {}
        kind = fields.get("type")
        if kind == "tool_result" and role == "user" and isinstance(fields.get("tool_use_id"), str):
            text = joined_text(f"{where}[{i}].content", fields.get("content", ""), TEXTS)
            results.append({"role": "tool", "tool_call_id": fields["tool_use_id"], "content": text})
        elif kind == "tool_use" and role == "assistant" and _is_call(fields):
            arguments = json.dumps(fields["input"], ensure_ascii=False)
            function = {"name": fields["name"], "arguments": arguments}
            calls.append({"id": fields["id"], "type": "function", "function": function})
        elif kind not in ("thinking", "redacted_thinking") or role != "assistant":
            said.append(block)
    message: dict[str, Any] = {"role": role, "content": joined_text(where, said, TEXTS)}
    if calls:
        message["tool_calls"] = calls
    return results if results and not said else [*results, message]


def _is_call(block: dict[str, Any]) -> bool:
    is_named = isinstance(block.get("id"), str) and isinstance(block.get("name"), str)
    return is_named and isinstance(block.get("input"), dict)


def _tools(name: str, value: Any) -> list[Any]:
    """Functions in the form of a chat: {"type": "function", "function": {...}}."""
    tools = []
    for i, tool in enumerate(a_list(name, value)):
        fields = a_dict(f"{name}[{i}]", tool)
        if fields.get("type", "custom") != "custom" or "input_schema" not in fields:
            form = f"must be {{name, description, input_schema}}, not one of type {shown(fields.get('type'))}"
            raise unsupported_value(name, f"{name}[{i}] {form}")
        function = {"name": fields.get("name"), "parameters": fields["input_schema"]}
        if fields.get("description") is not None:
            function["description"] = fields["description"]
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(name: str, value: Any) -> Several:
    choice = a_dict(name, value)
    kind, function = choice.get("type"), choice.get("name")
    if kind == "tool" and isinstance(function, str):
        made = f"={function}"
    elif kind in CHOICES:
        made = CHOICES[kind]
    else:
        forms = '{"type": "auto"}, {"type": "any"}, {"type": "none"} or {"type": "tool", "name": ...}'
        raise wrong(name, forms, value)
    return Several(tool_choice=made, parallel_tool_calls=choice.get("disable_parallel_tool_use") is not True)


def _thinking(name: str, value: Any) -> bool:
    """`budget_tokens` has no effect: the model decides how long it thinks."""
    kind: str = one_of("enabled", "adaptive", "disabled")(f"{name}.type", a_dict(name, value).get("type"))
    return kind != "disabled"


def _thread(name: str, _value: Any) -> NoReturn:
    """With these details, the tool runners of Anthropic's packages send whole conversations instead."""
    details = {"error_code": "thread_unsupported_request", "unsupported": [name]}
    message = f"{name} is not supported, because nothing is stored; send the whole conversation"
    raise ApiError(400, message, param=name, code="unsupported_parameter", details=details)


_output_config = inner({"format": Field(text_format, "schema"), **no_effect("effort")})

MESSAGES: Table = {
    **SHARED,
    "messages": Field(read_turns, is_needed=True),
    "system": Field(partial(joined_text, kinds=TEXTS)),
    "max_tokens": Field(integer(1), "max_new_tokens"),
    "stop_sequences": Field(setting, "stop"),
    "tools": Field(_tools),
    "tool_choice": Field(_tool_choice),
    "output_config": Field(_output_config),
    "thinking": Field(_thinking),
    "thread": Field(_thread),
    **no_effect(
        "cache_control", "context_management", "inference_geo", "speed", "user_profile_id", "diagnostics",
        "billing_policy", "fallbacks", "fallback_credit_token",
    ),
    **refusing(container=(), mcp_servers=([],), compaction=()),
}  # fmt: skip
