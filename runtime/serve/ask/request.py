"""A request for answers, read from its JSON body."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ...rules import is_integer
from ..options import MOST_CHOICES, MOST_PROMPTS
from ..refusals import Refused
from .fields import BodyFields, shown, wrong
from .messages import read_messages

KNOBS = ("exact", "tau", "metric", "profile", "window")
TEXT_TOKENS = 16  # default `max_tokens` of text completions, as in OpenAI's API


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions that an answer may call, or must call with `must`. `once`: at most one call."""

    functions: list[Any]
    must: bool
    once: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """One request for answers.

    kind: the path, /v1/chat/completions or /v1/completions
    model: its name, with or without a profile
    prompts: texts or lists of token ids; for "chat" one list of messages
    settings: fields of GenerationConfig
    max_tokens: of each answer
    profile: the name of a profile
    tools: functions that the answer may or must call
    n: answers to each prompt
    stream: whether the answer is streamed
    include_usage: whether the stream ends with `usage`
    return_steps: whether the tokens of each step are returned
    logprobs: whether the log-probabilities of tokens are returned
    knobs: the fields of KNOBS that the request sets
    """

    kind: Literal["chat", "text"]
    model: str | None
    prompts: list[Any]
    settings: dict[str, Any]
    max_tokens: int | None
    profile: str | None = None
    tools: Tools | None = None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    return_steps: bool = False
    logprobs: bool = False
    knobs: frozenset[str] = field(default_factory=frozenset)

    @property
    def is_structured(self) -> bool:
        """Whether it has a schema, a regex, choices or tools."""
        return self.tools is not None or bool({"schema", "regex", "choice"} & self.settings.keys())

    @property
    def has_seed(self) -> bool:
        return "seed" in self.settings


def read_ask(kind: Literal["chat", "text"], body: dict[str, Any]) -> Ask:
    """Read the body of a request. Raises Refused for the first invalid field."""
    fields = BodyFields(body)
    model = fields.text("model")
    if kind == "chat":
        prompts: list[Any] = [read_messages(fields.any("messages"))]
        most = fields.integer("max_completion_tokens")
        most = most if most is not None else fields.integer("max_tokens")
        fields.any("max_tokens")
        tools = _tools(fields)
        logprobs = bool(fields.flag("logprobs"))
    else:
        prompts, tools = _prompts(fields.any("prompt")), None
        most = fields.integer("max_tokens")
        most = TEXT_TOKENS if most is None else most
        logprobs = _text_logprobs(fields)
    n = fields.integer("n")
    if n is not None and not 1 <= n <= MOST_CHOICES:
        raise wrong("n", f"1 to {MOST_CHOICES}", n)
    if most is not None and most < 1:
        raise wrong("max_tokens", "an integer of 1 or more", most)
    knobs = frozenset(name for name in KNOBS if body.get(name) is not None)
    settings, profile = _settings(fields), fields.text("profile")
    _check_knobs(knobs, settings)
    if tools is not None and (structured := sorted({"schema", "regex", "choice"} & settings.keys())):
        raise Refused(400, f"tools and {structured[0]} exclude each other; use one", param="response_format")
    stream = bool(fields.flag("stream"))
    include_usage = _include_usage(fields, stream)
    return_steps = bool(fields.flag("return_steps"))
    fields.finish()
    return Ask(
        kind, model, prompts, settings, most, profile, tools, n or 1, stream, include_usage, return_steps,
        logprobs, knobs,
    )  # fmt: skip


def _settings(fields: BodyFields) -> dict[str, Any]:
    """The fields of GenerationConfig, under its names."""
    values: dict[str, Any] = {
        "temperature": fields.number("temperature"),
        "top_p": fields.number("top_p"),
        "top_k": fields.integer("top_k"),
        "min_p": fields.number("min_p"),
        "repetition_penalty": fields.number("repetition_penalty"),
        "seed": fields.integer("seed"),
        "stop": fields.texts("stop"),
        "lookup": fields.integer("lookup"),
        "exact": fields.flag("exact"),
        "tau": fields.number("tau"),
        "metric": fields.text("metric"),
        "window": _window(fields.any("window")),
        "cache_salt": fields.text("cache_salt"),
        "regex": fields.text("regex"),
        "choice": fields.texts("choice"),
        "grammar": fields.text("grammar"),
        "schema": _schema(fields.object("response_format")),
        "eos_ids": () if fields.flag("ignore_eos") else None,
    }
    if values["top_k"] == -1:
        values["top_k"] = 0  # off, in some APIs
    if isinstance(values["seed"], int) and -(2**63) <= values["seed"] < 0:
        values["seed"] += 2**64
    return {name: value for name, value in values.items() if value is not None}


def _check_knobs(knobs: frozenset[str], settings: dict[str, Any]) -> None:
    """Refuse combinations of exact, tau and profile."""
    if "profile" in knobs and (others := sorted(knobs - {"profile"})):
        raise Refused(400, f"a profile sets {others[0]}; use one of them", param=others[0])
    if settings.get("exact") and "tau" in knobs:
        raise Refused(400, "tau and exact exclude each other; use one of them", param="tau")
    if "metric" in knobs and "tau" not in knobs:
        raise Refused(400, "metric is the confidence that tau is compared with; add tau", param="metric")


def _window(value: object) -> Any:
    if value is None or value in ("auto", "full"):
        return value
    if not is_integer(value, 1):
        raise wrong("window", '"auto", "full" or an integer of 1 or more', value)
    return value


def _schema(form: dict[str, Any] | None) -> Any:
    """The JSON schema of a response_format."""
    kind = None if form is None else form.get("type")
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    named = form.get("json_schema")
    if kind == "json_schema" and isinstance(named, dict) and isinstance(named.get("schema"), dict | bool):
        return named["schema"]
    raise Refused(
        400,
        'response_format must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema",'
        ' "json_schema": {"name": ..., "schema": {...}}}',
        param="response_format",
    )


def _tools(fields: BodyFields) -> Tools | None:
    functions, choice = fields.list("tools"), fields.any("tool_choice")
    parallel = fields.flag("parallel_tool_calls")
    if not functions:
        if choice not in (None, "none", "auto"):
            raise Refused(400, "tool_choice needs tools", param="tool_choice")
        return None
    if choice == "none":
        return None
    if choice in (None, "auto", "required"):
        return Tools(functions, choice == "required", parallel is False)
    named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str):
        raise Refused(
            400,
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name":'
            f" ...}}}}, not {shown(choice)}",
            param="tool_choice",
        )
    tools = [tool for tool in functions if _name(tool) == name]
    if not tools:
        raise Refused(400, f"tool_choice {name[:60]!r} is not among the tools", param="tool_choice")
    return Tools(tools[:1], True, True)


def _name(tool: object) -> object:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _prompts(value: object) -> list[Any]:
    """One prompt or several, each a text or token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(is_integer(v) for v in value):
        return [value]
    if isinstance(value, list) and 0 < len(value) <= MOST_PROMPTS:
        ids = [isinstance(v, list) and bool(v) and all(is_integer(i) for i in v) for v in value]
        if all(ids) or all(isinstance(v, str) for v in value):
            return value
    what = f"a text, a list of token ids, or a list of 1 to {MOST_PROMPTS} of these"
    raise wrong("prompt", what, value)


def _text_logprobs(fields: BodyFields) -> bool:
    """Whether a text completion wants logprobs. Only those of the chosen tokens are known."""
    number = fields.integer("logprobs")
    if number is not None and number not in (0, 1):
        raise Refused(
            400,
            f"logprobs {number}: only those of the chosen tokens are known; use 0 or 1",
            param="logprobs",
            code="unsupported_parameter",
        )
    return number is not None


def _include_usage(fields: BodyFields, stream: bool) -> bool:
    options = fields.object("stream_options")
    if options is None:
        return False
    if not stream:
        raise Refused(400, "stream_options needs stream: true", param="stream_options")
    include = options.get("include_usage", False)
    if not isinstance(include, bool):
        raise wrong("stream_options.include_usage", "true or false", include)
    return include
