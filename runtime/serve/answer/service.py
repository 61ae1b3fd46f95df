"""Answering one ask, from its admission to its log line."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Hashable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from ...errors import MarsError
from ...session.answer import Event
from ..ask.request import Ask
from ..keys import Keys
from ..metrics import Metrics
from ..models.models import Models
from ..options import ServeOptions
from ..refusals import Refused, busy
from .admission import Admitted, admit
from .choice import Choice, Piece
from .events import GONE, Events, Receive
from .protocols.replies import REPLIES, Reply
from .steering import Streams

LOG = logging.getLogger("mars_export.serve")


@dataclass(slots=True)
class Service:
    """The parts of a server that all requests share."""

    models: Models
    options: ServeOptions
    metrics: Metrics
    keys: Keys
    streams: Streams = field(default_factory=Streams)


class Answering:
    """One ask from its admission to its end. As a context manager, it cancels its requests at exit."""

    def __init__(
        self, service: Service, ask: Ask, client: int | None, receive: Receive, address: str | None = None
    ) -> None:
        self._service, self._ask, self._client, self._receive = service, ask, client, receive
        # Clients take turns by key, or without keys by address.
        self._sender: Hashable = client if client is not None else address
        self._came = perf_counter()
        self._admitted: Admitted | None = None
        self._events: Events | None = None
        self._steps: dict[int, float] = {}  # time of the last step of each choice
        self._outcome = "cancelled"  # until it is over
        self.reply: Reply | None = None
        self.has_begun = self.is_streamed = False

    async def begin(self) -> Reply:
        """Submit the ask, and wait for its first row. Raises Refused."""
        service = self._service
        until = self._came + service.options.queue_timeout
        try:
            await asyncio.wait_for(self._wait_for_row(), until - perf_counter())
        except asyncio.TimeoutError:
            seconds = service.options.queue_timeout
            late = "no row was free" if self._admitted else "the prompt or its grammar was not processed"
            raise busy(f"{late} within {seconds:g} s; try again later", max(1.0, seconds / 2)) from None
        assert self.reply is not None
        self.has_begun = True
        service.streams.add(self.reply, self._client)
        return self.reply

    async def _wait_for_row(self) -> None:
        service = self._service
        self._admitted = await admit(service.models, service.options, self._ask, self._sender)
        self._events = Events(self._admitted.requests, self._receive)
        self.reply = REPLIES[self._ask.kind](self._admitted)
        await self._events.begun()

    async def pieces(self) -> AsyncIterator[tuple[Choice, Piece] | None]:
        """The pieces of all choices as they come; None after a silence. Raises Refused, also if the client
        disconnects.
        """
        assert self.reply is not None and self._events is not None, "begin first"
        while not self.reply.is_over:
            happening = await self._events.next(self._service.options.ping)
            if happening is None:
                yield None
                continue
            if happening is GONE:
                raise Refused(499, "the client went away")
            i, event = happening
            choice = self.reply.choices[i]
            if isinstance(event, BaseException):
                raise self._failed(event)
            if event.finish_reason in ("cancelled", "deadline") and not choice.is_cut:
                self._check_end(event, choice)
            self._count(i, event)
            yield choice, choice.push(event)
        self._outcome = "finished"

    @property
    def has_more(self) -> bool:
        """Whether the next piece is ready."""
        return self._events is not None and self._events.has_more

    def close(self) -> None:
        """Cancel running requests, and count and log the answer."""
        if self._events is not None:
            self._events.close()
        if self._admitted is None:
            return
        self._admitted.cancel()
        if self.reply is not None and self.has_begun:
            seconds = perf_counter() - self._came
            self._service.streams.drop(self.reply)
            name, requests = self._admitted.served.name, self._admitted.requests
            level = self._admitted.level or ""
            self._service.metrics.ended(name, requests, self._ask.n, level, self._outcome, seconds)
            self._log(self.reply, seconds)

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- parts ---

    def _count(self, i: int, event: Event) -> None:
        assert self._admitted is not None, "it has begun"
        served, now, before = self._admitted.served, perf_counter(), self._steps.get(i)
        if before is None:
            served.left(self._admitted.requests[i])
        if event.token_ids:
            self._steps[i] = now
        self._service.metrics.step(served, event, None if before is None else now - before)

    def _failed(self, error: BaseException) -> Refused:
        self._outcome = "failed"
        if isinstance(error, MarsError):
            return Refused.of(error)
        LOG.error("an answer failed: %s", type(error).__name__)
        return Refused(500, "the answer failed inside the server; see its log", code="failed")

    def _check_end(self, event: Event, choice: Choice) -> None:
        """Raise Refused if the server ended an answer early. A partial answer after a timeout is returned."""
        if event.finish_reason == "cancelled":
            raise Refused(
                503, "the server is closing; ask again", code="closing", headers={"retry-after": "5"}
            )
        if not choice.request.stats.tokens:
            self._outcome = "expired"
            seconds = self._service.options.request_timeout
            raise Refused(504, f"no answer within {seconds:g} s; ask for less, or try later", code="timeout")

    def _log(self, reply: Reply, seconds: float) -> None:
        admitted, stats = reply.admitted, reply.admitted.requests[0].stats
        prompts = admitted.requests[:: admitted.ask.n]  # each prompt counts once, as in `usage`
        fields: dict[str, Any] = {
            "id": reply.id, "model": admitted.model, "outcome": self._outcome, "client": self._client,
            "load_level": admitted.level,
            "exact": admitted.requests[0].exact, "tau": admitted.requests[0].tau,
            "answers": len(admitted.requests),
            "prompt_tokens": sum(request.stats.prompt_tokens for request in prompts),
            "cached_tokens": sum(request.stats.cached_tokens for request in prompts),
            "tokens": sum(request.stats.tokens for request in admitted.requests),
            "forwards": sum(request.stats.forwards for request in admitted.requests),
            "queue_ms": round(1000 * stats.queue_time, 1),
            "first_ms": round(1000 * stats.time_to_first_token, 1), "ms": round(1000 * seconds, 1),
        }  # fmt: skip
        LOG.info("answer", extra={"fields": fields})
