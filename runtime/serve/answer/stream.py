"""Server-sent events: the chunks of one reply, with a sign of life in silences. Knows no form of a chunk."""

from __future__ import annotations

from typing import Any

from starlette.types import Receive, Scope, Send

from ..refusals import Refused, encoded
from .service import Answering

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not collect what is said token by token
]
PING, DONE = b": ping\n\n", b"data: [DONE]\n\n"


class EventStream:
    """A response that streams an ask which has begun. Its errors are chunks: the status is sent before."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        answering = self._answering
        reply = answering.reply
        assert reply is not None, "begin first"
        with answering:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await _say(send, b"".join(_data(chunk) for chunk in reply.opening()))
            said = b""
            try:
                async for grown in answering.pieces():
                    said += PING if grown is None else b"".join(map(_data, reply.chunks(*grown)))
                    if said and not answering.has_more:  # else it goes out with what follows
                        await _say(send, said)
                        said = b""
                await _say(send, said + DONE)
            except Refused as refusal:
                if refusal.status != 499:
                    await _say(send, said + _data(refusal.body))
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _say(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


def _data(chunk: dict[str, Any]) -> bytes:
    return b"data: " + encoded(chunk) + b"\n\n"
