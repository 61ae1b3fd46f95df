"""The messages between the front and a replica, and the answer of an ASGI application to one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

MOST_WAITING = 64  # messages of an answer that may wait to be fetched
Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request for any replica of a bundle.

    `keys` are hashes of its prompt's beginnings (see affinity.py), `avoid` replicas that failed with it.
    """

    method: str
    path: str
    headers: Headers
    body: bytes
    keys: tuple[str, ...] = ()
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Begun:
    """The replica has the request: the first part of every answer."""

    replica: str


@dataclass(frozen=True, slots=True)
class Start:
    """Status and headers."""

    status: int
    headers: Headers


Part = Begun | Start | bytes


@dataclass(frozen=True, slots=True)
class Whole:
    """The whole answer of one replica."""

    replica: str
    status: int
    body: bytes


class Lost(Exception):
    """The replica of a call has ended, or dropped the call."""


async def ask(app: ASGIApp, call: Call) -> AsyncGenerator[Start | bytes, None]:
    """The parts of the answer; waiting bytes are joined. Closing the generator disconnects the client."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue(MOST_WAITING)
    disconnected = asyncio.Event()
    body: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Message:
        if body:
            return body.pop()
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(_scope(call), receive, messages.put)
        finally:
            if not disconnected.is_set():
                await messages.put(None)

    task = asyncio.ensure_future(run())
    try:
        is_over = False
        while not is_over:
            batch = [await messages.get()]
            while not messages.empty():
                batch.append(messages.get_nowait())
            joined = b""
            for message in batch:
                if message is None:
                    is_over = True
                elif message["type"] == "http.response.start":
                    yield Start(message["status"], tuple(message["headers"]))
                else:
                    joined += message.get("body", b"")
            if joined:
                yield joined
        await task
    finally:
        disconnected.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def whole(app: ASGIApp, call: Call) -> tuple[int, bytes]:
    """Status and body of the answer."""
    status, body = 500, b""
    async for part in ask(app, call):
        if isinstance(part, Start):
            status = part.status
        else:
            body += part
    return status, body


def _scope(call: Call) -> dict[str, Any]:
    size = (b"content-length", str(len(call.body)).encode())
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [*call.headers, size],
        "client": None,
        "server": None,
    }
