"""Relaying a request to a replica, and to another one if the first is lost before its first token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from time import monotonic
from typing import Any, Literal

from starlette.types import Receive, Scope, Send

from ..answer.answering import HEADERS, PING, failure
from ..refusals import Refused, busy
from .call import Begun, Headers, Lost, Part, Start

ATTEMPTS = 3  # a request may kill its replica
GONE = "the replica of this request was lost"
OPENINGS = ("response.created", "response.in_progress", "message_start")

Outcome = Literal["answered", "lost", "refused", "overloaded", "failed", "left"]
Attempt = Callable[[frozenset[str]], AsyncGenerator[Part, None]]
"""Sends the request to a replica, if possible to none of those in the set. Raises Lost."""


class Relay:
    """A response that relays a replica's answer. Until its first token only pings are sent, so that another
    replica can start again.
    """

    def __init__(
        self,
        attempt: Attempt,
        *,
        is_stream: bool,
        is_typed: bool = False,
        ping: float,
        patience: float,
        done: Callable[[Relay], None],
    ) -> None:
        """`is_typed`: whether the events of a stream have a type. `patience` is the time in seconds until a
        replica must have the request. `done` is called at the end.
        """
        self._attempt, self._is_stream, self._is_typed = attempt, is_stream, is_typed
        self._ping, self._done = ping, done
        self._patience, self._until = patience, monotonic() + patience
        self._start: Start | None = None  # of this attempt
        self._held = b""
        self._has_replica = self._has_started = self._has_text = False
        self.outcome: Outcome = "left"
        self.retries = 0

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._run(send))
        leaving = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, leaving):
                task.cancel()
            await asyncio.gather(work, leaving, return_exceptions=True)
            self._done(self)

    async def _run(self, send: Send) -> None:
        try:
            await self._answer(send)
        except Refused as refusal:
            self.outcome = _outcome(refusal.status)
            await self._fail(send, refusal)
        except Lost:
            self.outcome = "lost"
            reason = "its answer ends here" if self._has_text else f"so were {self.retries} others"
            headers = {"retry-after": "5"}
            error = Refused(503, f"{GONE}; {reason}; try again", code="replica_lost", headers=headers)
            await self._fail(send, error)

    async def _answer(self, send: Send) -> None:
        avoid: frozenset[str] = frozenset()
        while True:
            replica = ""
            self._start, self._held, self._has_replica = None, b"", False
            try:
                async with aclosing(_with_silences(self._attempt(avoid), self._silence)) as parts:
                    async for part in parts:
                        if isinstance(part, Begun):
                            self._has_replica, replica = True, part.replica
                        elif part is None:
                            await self._keep_alive(send)
                        else:
                            await self._take(send, part)
                await self._end(send)
                return
            except Lost:
                if self._has_text or self.retries + 1 >= ATTEMPTS:
                    raise
                self.retries += 1
                self._until = monotonic() + self._patience  # the lost attempt may have taken longer
                avoid |= {replica} - {""}

    # --- parts ---

    def _silence(self) -> float:
        """Seconds of silence until `_keep_alive`."""
        return self._ping if self._has_replica else max(0.0, min(self._ping, self._until - monotonic()))

    async def _keep_alive(self, send: Send) -> None:
        if not self._has_replica and monotonic() >= self._until:
            raise busy(
                f"no row was free within {self._patience:g} s; try again later",
                max(1.0, self._patience / 2),
            )
        if self._is_stream and self._start is not None and self._start.status == 200:
            await self._write(send, PING)

    async def _take(self, send: Send, part: Start | bytes) -> None:
        if isinstance(part, Start):
            self._start = part
        elif self._has_text:
            await self._write(send, part)
        else:
            self._held += part
            if self._is_stream and self._start is not None and self._start.status == 200:
                self._look()
                if self._has_text:
                    held, self._held = self._held, b""
                    await self._write(send, held)

    def _look(self) -> None:
        """Look for text of the answer in the held bytes. Raises Lost if the replica only says that
        it closes.
        """
        for event in _events(self._held):
            if _is_closing(event):
                raise Lost
            if not _is_opening(event):
                self._has_text = True
                return

    async def _end(self, send: Send) -> None:
        """Finish the response after the replica's last part."""
        start = self._start
        if start is None:
            raise Lost
        if self._has_text:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        elif start.status == 503 and _is_closing(_json(self._held)):
            raise Lost
        elif self._has_started:  # a stream: its status is sent
            await self._write(send, self._held if start.status == 200 else b"data: " + self._held + b"\n\n")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await send(
                {"type": "http.response.start", "status": start.status, "headers": list(start.headers)}
            )
            await send({"type": "http.response.body", "body": self._held, "more_body": False})
        self.outcome = _outcome(start.status)

    async def _write(self, send: Send, data: bytes) -> None:
        if not self._has_started:
            self._has_started = True
            headers: Headers = self._start.headers if self._start is not None else tuple(HEADERS)
            await send({"type": "http.response.start", "status": 200, "headers": list(headers)})
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _fail(self, send: Send, refusal: Refused) -> None:
        if not self._has_started:
            raise refusal
        await self._write(send, failure(refusal, is_typed=self._is_typed))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _with_silences(
    parts: AsyncGenerator[Part, None], silence: Callable[[], float]
) -> AsyncGenerator[Part | None, None]:
    """The parts as they come; None after each silence of `silence()` seconds."""
    coming: asyncio.Future[Part | _End] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(_next(parts))
            if not (await asyncio.wait({coming}, timeout=silence()))[0]:
                yield None
                continue
            part, coming = coming.result(), None
            if isinstance(part, _End):
                return
            yield part
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        await parts.aclose()


class _End:
    """The end of the parts."""


async def _next(parts: AsyncGenerator[Part, None]) -> Part | _End:
    return await anext(parts, _End())


def _events(data: bytes) -> list[Any]:
    """The complete events of a stream, without comments."""
    whole = data.split(b"\n\n")[:-1]
    lines = [line for event in whole for line in event.split(b"\n")]
    return [_json(line[6:]) for line in lines if line.startswith(b"data: ")]


def _json(data: bytes) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(data)
    return None


def _is_opening(event: Any) -> bool:
    """Whether an event comes before the answer: the first chunk, which has the role only, or by its type."""
    if not isinstance(event, dict):
        return False
    choices = event.get("choices")
    return event.get("type") in OPENINGS or (
        isinstance(choices, list)
        and bool(choices)
        and all(choice.get("delta") == {"role": "assistant", "content": ""} for choice in choices)
    )


def _is_closing(event: Any) -> bool:
    """Whether an event is the error of a closing server."""
    error = event.get("error") if isinstance(event, dict) else None
    return isinstance(error, dict) and error.get("code") == "closing"


def _outcome(status: int) -> Outcome:
    if status < 400:
        return "answered"
    return "overloaded" if status in (429, 503) else "failed" if status >= 500 else "refused"
