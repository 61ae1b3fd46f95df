"""Answering one request, from its admission to its log line: with one body, or with a stream of events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...batcher.request import Item, Items, Request
from ...decode.config import GenerationConfig
from ...decode.event import Event
from ...errors import MarsError
from ..api_error import ApiError, encoded, overloaded
from ..keys import Keys
from ..metrics import Metrics
from ..models import Models
from ..options import ServeOptions
from ..requests.api_request import ApiRequest, Kind
from ..requests.fields import Field, flag, read_fields, setting
from .admission import Admitted, submit_all
from .choice import Choice, Delta
from .protocols.anthropic import MessagesSerializer
from .protocols.completions import CompletionsSerializer
from .protocols.openai_responses import ResponsesSerializer
from .protocols.serializer import Serializer

FIELDS = {"tau": Field(setting), "exact": Field(flag)}
Streams = dict[str, tuple[Serializer, str | None]]
"""The running streams of a server by their ids, each with its client's digest (`Keys.find`)."""


def steer(streams: Streams, name: str, client: str | None, body: Mapping[str, Any]) -> dict[str, Any]:
    """Set tau or exact mode from the next step on, and return the settings. Clients steer their own streams
    only.
    """
    serializer, owner = streams.get(name, (None, None))
    if serializer is None or owner != client:
        raise ApiError(404, f"no stream {name[:80]!r} is running", param="id", code="stream_not_found")
    values, _ = read_fields(body, FIELDS)
    if len(values) != 1 or values.get("exact") is False:
        raise ApiError(400, 'send either {"tau": NUMBER} or {"exact": true}', param="tau")
    [(field, value)] = values.items()
    try:
        serializer.admitted.model.session.check(GenerationConfig(**values))
        for request in serializer.admitted.requests:
            setattr(request, field, value)
    except MarsError as error:
        raise ApiError.from_error(error, field) from None
    return {"id": name, "mars": serializer.settings()}


LOG = logging.getLogger("mars_export.serve")
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # tells nginx not to buffer the stream
]
PING, DONE = b": ping\n\n", b"data: [DONE]\n\n"
SERIALIZERS: dict[Kind, Callable[[Admitted], Serializer]] = {
    "chat": CompletionsSerializer,
    "text": CompletionsSerializer,
    "responses": ResponsesSerializer,
    "messages": MessagesSerializer,
}


@dataclass(slots=True)
class Service:
    """The parts of a server that all requests share."""

    models: Models
    options: ServeOptions
    metrics: Metrics
    keys: Keys
    streams: Streams = field(default_factory=dict)


async def answer(
    service: Service, api_request: ApiRequest, client: str | None, address: str | None, receive: Receive
) -> ApiResponse:
    """Submit a request, and wait until it runs. Raises ApiError; then nothing of it runs.

    `client` is the digest of its key. Clients take turns by key, or without keys by address.
    """
    arrived_at, items, options = perf_counter(), Items(), service.options

    async def admitted_and_running() -> tuple[Admitted, tuple[Request | None, Item]]:
        caller, timeout = address if client is None else client, options.request_timeout
        admitted = await submit_all(service.models, api_request, caller, arrived_at, timeout, items, cleanup)
        return admitted, await items.get()

    with ExitStack() as cleanup:
        cleanup.callback(asyncio.ensure_future(_listen(receive, items)).cancel)
        try:
            admitted, first = await asyncio.wait_for(admitted_and_running(), options.queue_timeout)
        except asyncio.TimeoutError:
            seconds = options.queue_timeout
            reason = f"no row was free, or the prompt or its grammar was not processed within {seconds:g} s"
            raise overloaded(f"{reason}; try again later", max(1.0, seconds / 2)) from None
        serializer = SERIALIZERS[api_request.kind](admitted)
        return ApiResponse(service, client, arrived_at, serializer, first, items, cleanup.pop_all())


async def _listen(receive: Receive, items: Items) -> None:
    """Add an ApiError when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
    items.put_nowait((None, ApiError(499, "the client disconnected")))


@dataclass(slots=True)
class ApiResponse:
    """The response to a request that runs, whose items `items` gets after the `first` one. In a stream errors
    are chunks, since the status is sent first. Closing `cleanup` ends everything that the request uses.
    """

    _service: Service
    _client: str | None
    _arrived_at: float
    _serializer: Serializer
    _first: tuple[Request | None, Item] | None
    _items: Items
    _cleanup: ExitStack
    _outcome: str = "cancelled"  # until it is over
    _steps: dict[int, float] = field(default_factory=dict)  # time of the last step of each choice

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._cleanup:
                if self._serializer.api_request.stream:
                    await self._stream(send)
                    return
                async for _ in self._deltas():
                    pass
                body = encoded(self._serializer.body())
                await Response(body, media_type="application/json")(scope, receive, send)
        finally:
            self._record()

    async def _stream(self, send: Send) -> None:
        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        serializer = self._serializer
        self._service.streams[serializer.id] = serializer, self._client
        self._cleanup.callback(self._service.streams.pop, serializer.id)
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await write(b"".join(map(_data, serializer.opening())))
        data = b""
        try:
            async for addition in self._deltas():
                data += PING if addition is None else b"".join(map(_data, serializer.chunks(*addition)))
                if data and self._items.empty():  # else it is sent with the next delta
                    await write(data)
                    data = b""
            await write(data + DONE if serializer.api_request.kind in ("chat", "text") else data)
        except ApiError as refusal:
            if refusal.status != 499:
                await write(data + _data(serializer.failure(refusal.body)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _deltas(self) -> AsyncIterator[tuple[Choice, Delta] | None]:
        """The addition of each item to a choice; None after a silence. Raises ApiError, also if the client
        disconnects.
        """
        while not self._serializer.is_over:
            request, item = await self._next()
            if isinstance(item, BaseException):
                raise self._failed(item)
            if request is None:
                yield None
                continue
            choice = self._serializer.choices[self._serializer.admitted.requests.index(request)]
            if item is None:
                yield choice, Delta()
            else:
                if item.finish_reason in ("cancelled", "deadline") and not choice.is_full:
                    self._check_end(item)
                self._count(item, choice)
                yield choice, choice.push(item)
        self._outcome = "finished"

    async def _next(self) -> tuple[Request | None, Item]:
        if (first := self._first) is not None:
            self._first = None
            return first
        if not self._items.empty():
            return self._items.get_nowait()
        loop, ping = asyncio.get_running_loop(), self._service.options.ping
        timer = loop.call_later(ping, self._items.put_nowait, (None, None))
        try:
            return await self._items.get()
        finally:
            timer.cancel()

    def _count(self, event: Event, choice: Choice) -> None:
        model, now, before = self._serializer.admitted.model, perf_counter(), self._steps.get(choice.index)
        if event.token_ids:
            self._steps[choice.index] = now
            self._service.metrics.step(
                model.name, len(event.token_ids), None if before is None else now - before
            )

    def _failed(self, error: BaseException) -> ApiError:
        if isinstance(error, ApiError):
            return error
        self._outcome = "failed"
        if isinstance(error, MarsError):
            return ApiError.from_error(error)
        LOG.error("an answer failed: %s", type(error).__name__)
        return ApiError(500, "the answer failed inside the server; see its log", code="failed")

    def _check_end(self, event: Event) -> None:
        """Raise ApiError if the server ended an answer early. After a timeout, what there is of any answer is
        returned.
        """
        if event.finish_reason == "cancelled":
            raise ApiError(
                503,
                "the server is shutting down; try again later",
                code="closing",
                headers={"retry-after": "5"},
            )
        if not any(request.stats.tokens for request in self._serializer.admitted.requests):
            self._outcome = "expired"
            seconds = self._service.options.request_timeout
            raise ApiError(
                504,
                f"no answer within {seconds:g} s; request fewer tokens, or try again later",
                code="timeout",
            )

    def _record(self) -> None:
        """Count and log the answer."""
        serializer, seconds = self._serializer, perf_counter() - self._arrived_at
        admitted = serializer.admitted
        self._service.metrics.ended(admitted, self._outcome, seconds)
        first, usage = admitted.requests[0], serializer.usage()
        fields: dict[str, Any] = {
            "id": serializer.id, "model": admitted.name, "outcome": self._outcome, "client": self._client,
            "exact": first.exact, "tau": first.tau,
            "answers": len(admitted.requests), "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "tokens": usage["completion_tokens"], "forwards": serializer.timings()["forwards"],
            "queue_ms": round(1000 * first.stats.queue_time, 1),
            "first_ms": round(1000 * first.stats.time_to_first_token, 1), "ms": round(1000 * seconds, 1),
        }  # fmt: skip
        LOG.info("answer", extra={"fields": fields})


def _data(chunk: dict[str, Any]) -> bytes:
    kind = f"event: {chunk['type']}\n".encode() if "type" in chunk else b""
    return kind + b"data: " + encoded(chunk) + b"\n\n"
