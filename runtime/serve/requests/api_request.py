"""A request for answers, read from its JSON body within limits of size, time and depth."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from starlette.requests import ClientDisconnect, Request

from ...decode.config import GenerationConfig
from ..api_error import CLOSE, ApiError, overloaded
from .anthropic import MESSAGES
from .completions import CHAT, TEXT
from .fields import Table, read_fields
from .openai_responses import LOGPROBS, RESPONSES

MAX_DEPTH = 80  # nesting: a schema may have 64 levels, inside of a request
LONG = 64 * 1024  # bytes; longer bodies are parsed in a thread
MAX_AT_ONCE = 64 << 20
PATIENCE = 4  # a client that still sends does not read the response: up to this multiple, it is read first


class Bodies:
    """Reads bodies of at most `max_bytes` each, within `seconds`, and about MAX_AT_ONCE bytes at a time."""

    def __init__(self, max_bytes: int, seconds: float) -> None:
        self._max_bytes, self._seconds = max_bytes, seconds
        self._reading, self._room = 0, max(MAX_AT_ONCE, 4 * max_bytes)

    async def read(self, request: Request) -> dict[str, Any]:
        """The JSON object of a body. Raises ApiError for any other body."""
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "compressed bodies are not supported; send plain JSON", headers=CLOSE)
        body = bytearray()
        try:
            await asyncio.wait_for(self._receive(request, body), self._seconds)
            return await asyncio.to_thread(parse, body) if len(body) > LONG else parse(body)
        except asyncio.TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {self._seconds:g} s; send it faster", headers=CLOSE
            ) from None
        except ClientDisconnect:
            raise ApiError(499, "the client disconnected") from None
        finally:
            self._reading -= len(body)

    async def _receive(self, request: Request, body: bytearray) -> None:
        too_large = ApiError(
            413, f"the body is larger than {self._max_bytes} bytes; send less", headers=CLOSE
        )
        size = 0
        if int(request.headers.get("content-length", "0")) > PATIENCE * self._max_bytes:
            raise too_large
        async for piece in request.stream():
            size += len(piece)
            if size <= self._max_bytes:
                body += piece
                self._reading += len(piece)
            if self._reading > self._room:
                raise overloaded("too many request bodies at once; try again in 1 s", 1.0, 503)
            if size > PATIENCE * self._max_bytes:
                break
        if size > self._max_bytes:
            raise too_large


def parse(body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object in `body`."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 text ({error.reason} at {error.start})") from None
    except RecursionError:
        raise ApiError(400, f"the body is nested more than {MAX_DEPTH} deep; make it flatter") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    if depth(value) > MAX_DEPTH:
        raise ApiError(400, f"the body is nested more than {MAX_DEPTH} deep; make it flatter")
    return value


def depth(value: Any) -> int:
    """The nesting of lists and objects, counted up to MAX_DEPTH + 1."""
    levels, values = 0, [value]
    while values := [v for v in values if isinstance(v, dict | list)]:
        levels += 1
        if levels > MAX_DEPTH:
            break
        values = [inner for v in values for inner in (v.values() if isinstance(v, dict) else v)]
    return levels


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


SETTINGS = frozenset(setting.name for setting in dataclasses.fields(GenerationConfig)) - {"tools"}
AS_READ = ("model", "profile", "n", "stream", "include_usage", "return_steps", "template", "thinking")
TEXT_TOKENS = 16  # default `max_tokens` of text completions, as in OpenAI's API

Kind = Literal["chat", "text", "responses", "messages"]
TABLES: Mapping[Kind, Table] = {"chat": CHAT, "text": TEXT, "responses": RESPONSES, "messages": MESSAGES}
PATHS: Mapping[str, Kind] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions that an answer may call, or must call with `must`. `once`: at most one call."""

    functions: list[Any]
    must: bool
    once: bool


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """One request for answers.

    kind: the protocol, by the path of the request
    prompts: texts or lists of token ids; for a chat one list of messages
    settings: fields of GenerationConfig
    model: its name, with or without a profile
    profile: the name of a profile
    tools: functions that the answer may or must call
    n: answers to each prompt
    stream: whether the answer is streamed
    include_usage: whether the stream ends with `usage`
    return_steps: whether the tokens of each step are returned
    logprobs: whether the log-probabilities of tokens are returned
    template: variables of the chat template
    thinking: whether the model is to think; None for the template's own choice
    names: the request's field of each setting, for errors
    body: the request as it was sent, which some protocols return
    """

    kind: Kind
    prompts: list[Any]
    settings: dict[str, Any]
    model: str | None = None
    profile: str | None = None
    tools: Tools | None = None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    return_steps: bool = False
    logprobs: bool = False
    template: Mapping[str, Any] = field(default_factory=dict)
    thinking: bool | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_seed(self) -> bool:
        return "seed" in self.settings


def read_request(kind: Kind, body: dict[str, Any]) -> ApiRequest:
    """Read the body of a request. Raises ApiError for the first invalid field."""
    values, names = read_fields(body, TABLES[kind])
    if kind == "text":
        values.setdefault("max_new_tokens", TEXT_TOKENS)
    settings = {name: value for name, value in values.items() if name in SETTINGS}
    tools = _tools(values, names)
    if tools is not None and tools.must:
        settings.pop("schema", None)  # of the text, and the answer is a call
    # A stored grammar may be compiled from tools, which the prompt then should list. With a schema, the
    # answer is calls or JSON of the schema.
    if tools is not None and (structured := sorted({"regex", "choice"} & settings.keys())):
        name = structured[0]
        raise ApiError(400, f"tools and {names[name]} exclude each other; use one", param=names[name])
    if "include_usage" in values and not values.get("stream"):
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    if values.get("top_logprobs") and "logprobs" not in values:
        needed = f'include: ["{LOGPROBS}"]' if kind == "responses" else "logprobs: true"
        raise ApiError(400, f"top_logprobs needs {needed}", param="top_logprobs")
    return ApiRequest(
        kind,
        values["prompts"] if kind == "text" else [_with_system(values)],
        settings,
        tools=tools,
        logprobs="logprobs" in values,
        names=names,
        body=body,
        **{name: values[name] for name in AS_READ if name in values},
    )


def _with_system(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a chat, with the system text that some protocols have in a field of its own."""
    messages: list[dict[str, Any]] = values["messages"]
    if not values.get("system"):
        return messages
    system, rest = values["system"], messages
    if messages[0]["role"] == "system":
        system, rest = f"{system}\n\n{messages[0]['content']}", messages[1:]
    return [{"role": "system", "content": system}, *rest]


def _tools(values: Mapping[str, Any], names: Mapping[str, str]) -> Tools | None:
    """The tools of a request, whose choice is none, auto, required, or "=" and a name."""
    functions, choice = values.get("tools"), values.get("tool_choice", "auto")
    if not functions:
        if choice not in ("none", "auto"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return None
    if choice == "none":
        return None
    if choice in ("auto", "required"):
        return Tools(functions, choice == "required", values.get("parallel_tool_calls") is False)
    tools, name = [tool for tool in functions if _name(tool) == choice[1:]], choice[1:61]
    if not tools:
        raise ApiError(400, f"tool_choice {name!r} is not among the tools", param=names["tool_choice"])
    return Tools(tools[:1], True, True)


def _name(tool: object) -> object:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None
