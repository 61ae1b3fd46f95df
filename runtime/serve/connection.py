"""A connection with deadlines for headers and for writing, which uvicorn lacks, and JSON error responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from .options import MAX_CONNECTIONS
from .refusals import Refused, encoded


class Connection(H11Protocol):
    """`connections` sets the timeouts of its subclass. New connections above the limit are closed."""

    header_timeout, write_timeout = 10.0, 30.0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop("headers")
        self._stop("write")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_headers()
        else:
            self._stop("headers")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start("write", self.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("write")

    def send_400_response(self, msg: str) -> None:
        """The response to invalid HTTP; 431 if the headers are too large."""
        self._complain(431 if len(self.conn.trailing_data[0]) > 16_384 else 400, msg)

    def _await_headers(self) -> None:
        """The time runs from the connection or the last request; one byte a second does not extend it."""
        self._start("headers", self.header_timeout, self._too_slow)

    def _start(self, name: str, seconds: float, end: Callable[[], None]) -> None:
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, end)

    def _stop(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()

    def _too_slow(self) -> None:
        if not self.transport.is_closing() and self.conn.their_state is h11.IDLE:
            self._complain(408, f"the headers did not arrive within {self.header_timeout:g} s")

    def _complain(self, status: int, message: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = encoded(Refused(status, message).body)
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            response = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def connections(header_timeout: float, write_timeout: float) -> type[Connection]:
    """The class of a server's connections."""
    timeouts = {"header_timeout": header_timeout, "write_timeout": write_timeout}
    return type("Connection", (Connection,), timeouts)
