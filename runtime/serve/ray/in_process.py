"""Calling an ASGI application without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import ASGIApp, Message

from .call import Call, Start

MOST_WAITING = 64  # messages that may wait to be fetched


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
