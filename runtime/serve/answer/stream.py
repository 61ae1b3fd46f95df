"""Streaming a reply as server-sent events."""

from __future__ import annotations

from typing import Any

from starlette.types import Receive, Scope, Send

from ..refusals import Refused, encoded
from .service import Answering

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # tells nginx not to buffer the stream
]
PING, DONE = b": ping\n\n", b"data: [DONE]\n\n"


class EventStream:
    """A response that streams an ask which has begun. Errors are chunks, since the status is sent first."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        answering = self._answering
        reply = answering.reply
        assert reply is not None, "begin first"
        with answering:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await _write(send, b"".join(_data(chunk) for chunk in reply.opening()))
            data = b""
            try:
                async for piece in answering.pieces():
                    data += PING if piece is None else b"".join(map(_data, reply.chunks(*piece)))
                    if data and not answering.has_more:  # else it is sent with the next piece
                        await _write(send, data)
                        data = b""
                await _write(send, data if reply.admitted.ask.is_typed else data + DONE)
            except Refused as refusal:
                if refusal.status != 499:
                    await _write(send, data + failure(refusal, is_typed=reply.admitted.ask.is_typed))
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _write(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


def failure(refusal: Refused, *, is_typed: bool) -> bytes:
    """The last event of a stream that failed. `is_typed`: whether events of its protocol have a type."""
    return _data({"type": "error"} | refusal.body if is_typed else refusal.body)


def _data(chunk: dict[str, Any]) -> bytes:
    kind = f"event: {chunk['type']}\n".encode() if "type" in chunk else b""
    return kind + b"data: " + encoded(chunk) + b"\n\n"
