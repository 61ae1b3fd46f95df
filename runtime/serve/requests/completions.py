"""The fields of /v1/chat/completions and /v1/completions, and the fields that all protocols share."""

from __future__ import annotations

import re
from typing import Any

from ...decode.config import MAX_TOP_LOGPROBS
from ...rules import is_integer
from ..options import MAX_CHOICES, MAX_PROMPTS
from .fields import (
    Field,
    FieldParser,
    Several,
    Table,
    a_dict,
    a_list,
    flag,
    ignored,
    inner,
    integer,
    one_of,
    read_fields_in,
    read_messages,
    setting,
    shown,
    text,
    unsupported,
    unsupported_value,
    wrong,
)


def _top_k(_name: str, value: Any) -> Any:
    return 0 if value == -1 else value  # -1 is off in some APIs


def _seed(_name: str, value: Any) -> Any:
    return value + 2**64 if is_integer(value, -(2**63)) and value < 0 else value


def _ignore_eos(name: str, value: Any) -> tuple[int, ...] | None:
    return () if flag(name, value) else None


def _logit_bias(name: str, value: Any) -> dict[Any, Any]:
    """Biases by token ids, which are texts in JSON."""
    is_id = re.compile("[0-9]{1,9}").fullmatch
    return {int(key) if is_id(key) else key: bias for key, bias in a_dict(name, value).items()}


def settings(*names: str) -> dict[str, Field]:
    """Fields of GenerationConfig, which checks them."""
    return dict.fromkeys(names, Field(setting))


def no_effect(*names: str) -> dict[str, Field]:
    """Fields that do not change the answer."""
    return dict.fromkeys(names, Field(ignored))


def refusing(**neutral: tuple[Any, ...]) -> dict[str, Field]:
    """Unsupported fields that would change the answer, with the values that would not."""
    return {name: Field(unsupported(*values)) for name, values in neutral.items()}


def _schema(name: str, value: Any) -> Any:
    if not isinstance(value, dict | bool):
        raise wrong(name, "a JSON schema, an object", value)
    return value


def _named_schema(name: str, value: Any) -> dict[str, Any]:
    return read_fields_in(name, value, NAMED_SCHEMA)[0]


NAMED_SCHEMA: Table = {"schema": Field(_schema), **no_effect("name", "description", "strict")}
FORMAT: Table = {"type": Field(text), "json_schema": Field(_named_schema), **NAMED_SCHEMA}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

SHARED: Table = {
    "model": Field(text),
    "stream": Field(flag),
    "profile": Field(text),
    "top_k": Field(_top_k),
    "seed": Field(_seed),
    "logit_bias": Field(_logit_bias),
    "ignore_eos": Field(_ignore_eos, "eos_ids"),
    "chat_template_kwargs": Field(a_dict, "template"),
    **settings(
        "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "exact", "tau", "metric", "masks", "prompt_lookup", "cache_salt", "regex", "choice",
        "grammar",
    ),
    **no_effect("user", "metadata", "service_tier", "safety_identifier", "request_id", "priority"),
    **refusing(
        min_tokens=(0,), length_penalty=(1,), stop_token_ids=([],), typical_p=(1,), mirostat=(0,),
        skip_special_tokens=(True,), chat_template=(),
    ),
}  # fmt: skip


def text_format(name: str, form: Any) -> Any:
    """The schema of a text format, which chat completions have in `json_schema`, and other protocols not."""
    values, _ = read_fields_in(name, form, FORMAT)
    kind, schema = values.get("type"), values.get("json_schema", values).get("schema")
    if kind == "text" and schema is None:
        return None
    if kind == "json_object":
        return {"type": "object"} if schema is None else schema
    if kind == "json_schema" and schema is not None:
        return schema
    forms = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema"} with a "schema"'
    raise wrong(name, forms, form)


def function_tool(where: str, value: Any) -> dict[str, Any]:
    tool: dict[str, Any] = a_dict(where, value)
    if tool.get("type", "function") != "function":
        reason = f"is {shown(tool['type'])}, and only function tools are supported; remove this tool"
        raise unsupported_value(where.partition("[")[0], f"{where}.type {reason}")
    return tool


def _tools(name: str, value: Any) -> list[Any]:
    """Functions, whose null fields count as absent."""
    tools = []
    for i, tool in enumerate(a_list(name, value)):
        function = a_dict(f"{name}[{i}].function", function_tool(f"{name}[{i}]", tool).get("function"))
        tools.append({**tool, "function": {key: part for key, part in function.items() if part is not None}})
    return tools


def tool_choice(name: str, value: Any) -> str:
    """none, auto, required, or "=" and the name of a function, which chat completions have in `function`."""
    if value in ("none", "auto", "required"):
        return str(value)
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function", value)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return f"={function['name']}"
    raise wrong(name, '"none", "auto", "required" or {"type": "function"} with a "name"', value)


def reasoning_effort(name: str, value: Any) -> bool | None:
    """False without thinking. How long a model thinks is its own decision."""
    return False if one_of(*EFFORTS)(name, value) == "none" else None


def _chat_logprobs(name: str, value: Any) -> int | None:
    return 0 if flag(name, value) else None


def _text_logprobs(name: str, value: Any) -> Several:
    """For the chosen tokens; from 2 on, also for the most likely ones, which needs a bundle with logits."""
    num = integer(0, MAX_TOP_LOGPROBS)(name, value)
    return Several(logprobs=0, top_logprobs=num if num > 1 else None)


def _prompts(name: str, value: Any) -> list[Any]:
    """One prompt or several, each a text or token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(is_integer(v) for v in value):
        return [value]
    if isinstance(value, list) and 0 < len(value) <= MAX_PROMPTS:
        ids = [isinstance(v, list) and bool(v) and all(is_integer(i) for i in v) for v in value]
        if all(ids) or all(isinstance(v, str) for v in value):
            return value
    raise wrong(name, f"a text, a list of token ids, or a list of 1 to {MAX_PROMPTS} of these", value)


_stream_options: FieldParser = inner({"include_usage": Field(flag), "include_obfuscation": Field(ignored)})

COMPLETIONS: Table = {
    **SHARED,
    **settings("stop"),
    "n": Field(integer(1, MAX_CHOICES)),
    "max_tokens": Field(integer(1), "max_new_tokens"),
    "stream_options": Field(_stream_options),
    "response_format": Field(text_format, "schema"),
    "return_steps": Field(flag),
    **no_effect(
        "store", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "timings_per_token",
        "verbosity",
    ),
    **refusing(
        best_of=(1,), echo=(False,), suffix=("",), use_beam_search=(False,), add_special_tokens=(),
    ),
}  # fmt: skip

CHAT: Table = {
    **COMPLETIONS,
    "messages": Field(read_messages, is_needed=True),
    "max_completion_tokens": Field(integer(1), "max_new_tokens"),
    "tools": Field(_tools),
    "tool_choice": Field(tool_choice),
    "parallel_tool_calls": Field(flag),
    "logprobs": Field(_chat_logprobs),
    **settings("top_logprobs"),
    "reasoning_effort": Field(reasoning_effort, "thinking"),
    **refusing(
        modalities=(["text"],), functions=(), function_call=(), audio=(), prediction=(),
        web_search_options=(), moderation=(), add_generation_prompt=(True,),
        continue_final_message=(False,),
    ),
}  # fmt: skip

TEXT: Table = {
    **COMPLETIONS,
    "prompt": Field(_prompts, "prompts", is_needed=True),
    "logprobs": Field(_text_logprobs),
    **refusing(chat_template_kwargs=({},)),
}
