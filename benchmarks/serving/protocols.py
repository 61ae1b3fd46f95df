"""Requests of chat completions, responses and messages, and the content of their answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"

ROOM = {"type": "string", "maxLength": 16}
LIGHT = {
    "type": "object",
    "properties": {"room": ROOM, "state": {"enum": ["on", "off"]}},
    "required": ["room", "state"],
    "additionalProperties": False,
}
HEAT = {
    "type": "object",
    "properties": {"room": ROOM, "degrees": {"type": "integer", "minimum": 5, "maximum": 30}},
    "required": ["room", "degrees"],
    "additionalProperties": False,
}
FUNCTIONS = [("set_light", LIGHT), ("set_temperature", HEAT)]
CALL = {"name": "set_light", "arguments": json.dumps({"room": "hall", "state": "on"})}
SAMPLED = {"temperature": 0.8, "seed": 5}

CHAT_TOOLS = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in FUNCTIONS]
RESPONSES_TOOLS = [{"type": "function", "name": n, "parameters": s} for n, s in FUNCTIONS]
MESSAGES_TOOLS = [{"name": n, "input_schema": s} for n, s in FUNCTIONS]

CHAT_FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"tau": 1},
    {"tau": 0.9, "masks": "full"},
    {"tools": CHAT_TOOLS},
    {"tools": CHAT_TOOLS, "tool_choice": "required"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "light", "schema": LIGHT}}},
    {"n": 2, **SAMPLED},
    {"reasoning_effort": "none", "stop": [".", "}"]},
)
RESPONSES_FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"tools": RESPONSES_TOOLS, "parallel_tool_calls": False},
    {"tools": RESPONSES_TOOLS, "tool_choice": {"type": "function", "name": "set_temperature"}},
    {"text": {"format": {"type": "json_schema", "name": "heat", "schema": HEAT}}},
    {"reasoning": {"effort": "none"}, **SAMPLED},
)
MESSAGES_FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"tools": MESSAGES_TOOLS},
    {"tools": MESSAGES_TOOLS, "tool_choice": {"type": "any"}},
    {"output_config": {"format": {"type": "json_schema", "schema": LIGHT}}},
    {"thinking": {"type": "disabled"}, "stop_sequences": [".", "}"], **SAMPLED},
)


def requests(chats: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """The path and the body of each chat: the protocols in turns, each with its forms in turns."""
    found = []
    for i, chat in enumerate(chats):
        path = (CHAT, RESPONSES, MESSAGES)[(i + i // 3) % 3]  # each with every task
        system = [m for m in chat["messages"] if m["role"] == "system"]
        rest = [m for m in chat["messages"] if m["role"] != "system"]
        called = i % 4 == 3  # the question comes after a call and its result
        if path == CHAT:
            results = [
                {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": CALL}]},
                {"role": "tool", "tool_call_id": "c1", "content": "done"},
            ]
            turns = [*system, *_after(rest, results if called else [])]
            body = {
                "messages": turns,
                "max_tokens": chat["max_tokens"],
                **CHAT_FORMS[i // 3 % len(CHAT_FORMS)],
            }
        elif path == RESPONSES:
            results = [
                {"type": "function_call", "call_id": "c1", **CALL},
                {"type": "function_call_output", "call_id": "c1", "output": "done"},
            ]
            body = {"input": _after(rest, results if called else []), "max_output_tokens": chat["max_tokens"]}
            body |= {"instructions": system[0]["content"]} if system else {}
            body |= RESPONSES_FORMS[i // 3 % 5]
        else:
            use = {
                "type": "tool_use",
                "id": "c1",
                "name": CALL["name"],
                "input": json.loads(CALL["arguments"]),
            }
            results = [
                {"role": "assistant", "content": [use]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "done"}],
                },
            ]
            body = {"messages": _after(rest, results if called else []), "max_tokens": chat["max_tokens"]}
            body |= {"system": system[0]["content"]} if system else {}
            body |= MESSAGES_FORMS[i // 3 % 5]
        found.append((path, body))
    return found


def _after(turns: list[dict[str, Any]], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last question, asked again after its call and its result."""
    return [*turns, *results, turns[-1]] if results else turns


def content(path: str, body: dict[str, Any]) -> str:
    """What an answer says, without ids and counts, as JSON: kinds, names and texts, and how it ended."""
    parts: list[Any]
    if path == CHAT:
        parts = [_choice(choice["message"], choice["finish_reason"]) for choice in body["choices"]]
    elif path == RESPONSES:
        parts = [_item(item) for item in body["output"]] + [body["status"]]
    else:
        parts = [_block(block) for block in body["content"]] + [body["stop_reason"]]
    return json.dumps(parts)


def streamed_content(path: str, events: Iterable[dict[str, Any]]) -> str:
    """The same of a stream, from its deltas alone. Raises ValueError for an error event."""
    found = list(events)
    if wrong := [event for event in found if "error" in event and event.get("error")]:
        raise ValueError(f"error event: {json.dumps(wrong[0])[:300]}")
    if path == CHAT:
        return _streamed_chat(found)
    return _streamed_items(found) if path == RESPONSES else _streamed_blocks(found)


# --- one answer ---


def _choice(message: dict[str, Any], reason: str | None) -> list[Any]:
    calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls") or ()]
    return [message.get("reasoning_content") or "", message.get("content") or "", calls, reason]


def _streamed_chat(events: list[dict[str, Any]]) -> str:
    choices: dict[int, dict[str, Any]] = {}
    reasons: dict[int, str] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        delta, index = choice["delta"], choice["index"]
        message = choices.setdefault(index, {"content": "", "reasoning_content": "", "tool_calls": []})
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        message["tool_calls"] += delta.get("tool_calls") or []
        if choice["finish_reason"]:
            reasons[index] = choice["finish_reason"]
    return json.dumps([_choice(choices[i], reasons.get(i)) for i in sorted(choices)])


def _item(item: dict[str, Any]) -> list[str]:
    if item["type"] == "function_call":
        return [item["type"], item["name"], item["arguments"]]
    return [item["type"], "", "".join(part["text"] for part in item["content"])]


def _streamed_items(events: list[dict[str, Any]]) -> str:
    parts: list[Any] = []
    for event in events:
        if event["type"] == "response.output_item.added":
            parts.append([event["item"]["type"], event["item"].get("name", ""), ""])
        elif event["type"].endswith(".delta"):
            parts[event["output_index"]][2] += event["delta"]
    return json.dumps([*parts, events[-1]["type"].removeprefix("response.")])


def _block(block: dict[str, Any]) -> list[str]:
    if block["type"] == "tool_use":
        return [block["type"], block["name"], json.dumps(block["input"])]
    return [block["type"], "", block.get("text", "") + block.get("thinking", "")]


def _streamed_blocks(events: list[dict[str, Any]]) -> str:
    parts: list[Any] = []
    reason = None
    for event in events:
        if event["type"] == "content_block_start":
            block = event["content_block"]
            parts.append([block["type"], block.get("name", ""), ""])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            words = (delta.get(name, "") for name in ("text", "thinking", "partial_json"))
            parts[event["index"]][2] += "".join(words)
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    for part in parts:
        if part[0] == "tool_use":
            part[2] = json.dumps(json.loads(part[2]))
    return json.dumps([*parts, reason])
