"""A server that speaks docs/serving.md's HTTP with a script for a model: the page's other side in tests.

Its model knows the tokens of its answer and how sure it is of each; a step gives what tau lets through.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mars_export.runtime.serve.page import page, page_headers

BLOCK = 8
Token = tuple[str, float]


def tokens_of(text: str, p: float = 0.97) -> list[Token]:
    """Words with the space before them; every fifth is one that the model is less sure of."""
    words = [w if i == 0 else f" {w}" for i, w in enumerate(text.split(" "))]
    return [(w, p if i % 5 else 0.55) for i, w in enumerate(words)]


@dataclass(slots=True)
class Stream:
    """A running answer and what holds for it."""

    exact: bool
    tau: float | None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class FakeServe:
    """`answers`: what it says, the last again and again. `pace`: seconds of a step. `key`: what it asks for.

    `forced`: the second token of each step is a grammar's. `refusal`: why it answers nothing.
    `thinking`: how many tokens at the beginning of an answer are thinking.
    `calls`: names and arguments of the interface's tool calls, which follow the answer in pieces.
    """

    answers: Sequence[Sequence[Token]]
    pace: float = 0.0
    key: str = ""
    forced: bool = False
    refusal: str = ""
    thinking: int = 0
    calls: Sequence[tuple[str, str]] = ()
    requests: list[dict[str, Any]] = field(default_factory=list)
    controls: list[dict[str, Any]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)  # how streams ended: "whole" or "left"

    def __post_init__(self) -> None:
        self._streams: dict[str, Stream] = {}
        self._numbers = itertools.count(1)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", lambda _: Response(page(), headers=page_headers())),
                Route("/health", lambda _: JSONResponse({"status": "ok"})),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/mars/streams/{id}", self._steer, methods=["POST"]),
            ]
        )

    def _refusal(self, request: Request) -> JSONResponse | None:
        if not self.key or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        error = {"message": "wrong API key", "type": "authentication_error", "param": None, "code": None}
        return JSONResponse({"error": error}, 401)

    async def _models(self, request: Request) -> Response:
        about = {
            "block": BLOCK, "precision": "w8a8", "context": 1024, "sampling": True, "structured": True,
        }  # fmt: skip
        state = "loaded" if any(body["model"] == "other" for body in self.requests) else "unloaded"
        entry = {"object": "model", "created": 0, "owned_by": "mars-export"}
        names = {
            "tiny": {**about, "profiles": ["assistant"]},
            "tiny:assistant": about,
            "other": {"profiles": [], "state": state},
        }
        data = [{"id": name, "mars": mars, **entry} for name, mars in names.items()]
        return self._refusal(request) or JSONResponse({"object": "list", "data": data})

    async def _steer(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        if (stream := self._streams.get(request.path_params["id"])) is None:
            error = {"message": "over", "type": "invalid_request_error", "param": None, "code": None}
            return JSONResponse({"error": error}, 404)
        body = await request.json()
        self.controls.append(body)
        stream.exact, stream.tau = body.get("exact", False), body.get("tau")
        return JSONResponse({"exact": stream.exact, "tau": stream.tau})

    async def _chat(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        body = await request.json()
        self.requests.append(body)
        if self.refusal:
            error = {"message": self.refusal, "type": "overloaded", "param": None, "code": None}
            return JSONResponse({"error": error}, 429, {"Retry-After": "2"})
        name = f"chatcmpl-{next(self._numbers)}"
        answer = list(self.answers[min(len(self.requests), len(self.answers)) - 1])
        stream = Stream("tau" not in body, body.get("tau"))
        self._streams[name] = stream
        events = self._events(name, stream, answer, body)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _events(
        self, name: str, stream: Stream, answer: list[Token], body: dict[str, Any]
    ) -> AsyncIterator[str]:
        def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, **more.pop("choice", {})}
            whole = {"id": name, "object": "chat.completion.chunk", "choices": [choice], **more}
            return f"data: {json.dumps(whole)}\n\n"

        how_it_ended = "left"
        try:
            yield ": ping\n\n" + chunk({"role": "assistant"})
            at, forwards = 0, 0
            while at < len(answer):
                await asyncio.sleep(self.pace)
                count, forwards = self._step(stream, answer[at:], forwards == 0), forwards + 1
                step = [
                    {"id": at + i, "text": text, "p": p, "how": self._how(stream, i, count)}
                    | ({"thinking": True} if at + i < self.thinking else {})
                    for i, (text, p) in enumerate(answer[at : at + count])
                ]
                at += count
                content = {"content": "".join(t["text"] for t in step if not t.get("thinking"))}
                yield chunk(content, choice={"steps": [{"step": forwards, "tokens": step}]})
            for i, (tool, arguments) in enumerate(self.calls):
                for part in ({"name": tool, "arguments": arguments[:3]}, {"arguments": arguments[3:]}):
                    yield chunk({"tool_calls": [{"index": i, "type": "function", "function": part}]})
            used = {"exact": stream.exact, "tau": stream.tau, "metric": "probability"}
            used |= {"profile": body.get("profile"), "masks": "auto"}
            per_second = 1 / self.pace if self.pace else 1000.0
            timings = {"prompt_n": 40, "prompt_ms": 9.0, "cached_n": 32, "predicted_n": at, "queue_ms": 0.1}
            timings |= {"predicted_ms": forwards * self.pace * 1e3, "forwards": forwards}
            timings |= {"predicted_per_second": per_second * at / max(1, forwards)}
            timings |= {"tokens_per_forward": at / max(1, forwards)}
            yield chunk({}, "stop", mars=used, timings=timings)
            usage = {"prompt_tokens": 40, "completion_tokens": at, "total_tokens": 40 + at}
            usage |= {"prompt_tokens_details": {"cached_tokens": 32}}
            yield f"data: {json.dumps({'id': name, 'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"
            how_it_ended = "whole"
        finally:
            self.ended.append(how_it_ended)
            del self._streams[name]

    def _step(self, stream: Stream, rest: list[Token], is_first: bool) -> int:
        if stream.exact:
            return 1 if is_first else min(BLOCK - 2, len(rest))
        tau = 0.95 if stream.tau is None else stream.tau
        count = 1
        while tau < 1 and count < min(BLOCK, len(rest)) and rest[count][1] >= tau:
            count += 1
        return count

    def _how(self, stream: Stream, i: int, count: int) -> str:
        if self.forced and i == 1:
            return "forced"
        return "verified" if stream.exact and i < count - 1 else "accepted"


class Running:
    """An ASGI application on a port of its own, in a thread: `with Running(app) as address`."""

    def __init__(self, app: Any, port: int = 0) -> None:
        settings = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", lifespan="off")
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the server did not start")
            self._thread.join(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}/"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.force_exit = self._server.should_exit = True
        self._thread.join(10)
