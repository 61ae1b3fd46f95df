"""One HTTP/1.1 exchange on its own connection over plain sockets, so that a client can also misbehave.

Chunked answers and server-sent events are supported.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

LINE = 1 << 20  # the longest line of an answer
LAST = ("response.completed", "response.incomplete", "message_stop")  # events that end a typed stream


class Broken(Exception):
    """The connection ended before the answer did."""


@dataclass(slots=True)
class Answer:
    """What came of a streamed request. Seconds from its sending."""

    status: int
    first: float | None = None
    seconds: float = 0.0
    tokens: int = 0
    pieces: int = 0  # chunks with text: tokens, where a server counts none
    timings: dict[str, Any] = field(default_factory=dict)


@asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """To this machine. Left early, the other side sees a reset or an end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=LINE)
    try:
        yield reader, writer
    finally:
        writer.close()


def head(method: str, path: str, length: int | None = None, key: str = "") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
    lines += [f"Authorization: Bearer {key}"] if key else []
    lines += ["Content-Type: application/json", f"Content-Length: {length}"] if length is not None else []
    return "\r\n".join([*lines, "", ""]).encode()


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers."""
    line = await reader.readline()
    if not line:
        raise Broken("no answer")
    status, headers = int(line.split()[1]), {}
    while (line := await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return status, headers


async def body_lines(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body's lines, without their ends, as they come."""
    if headers.get("transfer-encoding", "").lower() != "chunked":
        while line := await reader.readline():
            yield line.rstrip(b"\r\n")
        return
    rest = b""
    while True:
        line = await reader.readline()
        if not line:
            raise Broken("the answer broke off")
        size = int(line.split(b";")[0], 16)
        if size == 0:
            break
        rest += await reader.readexactly(size)
        await reader.readexactly(2)
        *whole, rest = rest.split(b"\n")
        for part in whole:
            yield part.rstrip(b"\r")
    if rest:
        yield rest


async def get(port: int, path: str, key: str = "") -> tuple[int, str]:
    async with connection(port) as (reader, writer):
        writer.write(head("GET", path, key=key))
        status, headers = await read_head(reader)
        return status, "\n".join([line.decode() async for line in body_lines(reader, headers)])


async def post(port: int, path: str, body: bytes, key: str = "") -> tuple[int, str]:
    """A request whose answer is one piece."""
    async with connection(port) as (reader, writer):
        writer.write(head("POST", path, len(body), key) + body)
        status, headers = await read_head(reader)
        return status, "\n".join(
            [line.decode("utf-8", "replace") async for line in body_lines(reader, headers)]
        )


async def events(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream, up to its end mark."""
    async for line in body_lines(reader, headers):
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            yield event
            if event.get("type") in LAST:
                return
    raise Broken("the stream had no end mark")


async def stream(port: int, body: dict[str, Any]) -> Answer:
    """A well-behaved streamed chat."""
    async with connection(port) as (reader, writer):
        began = perf_counter()
        data = json.dumps({**body, "stream": True}).encode()
        writer.write(head("POST", "/v1/chat/completions", len(data)) + data)
        status, headers = await read_head(reader)
        answer = Answer(status)
        if status == 200:
            async for chunk in events(reader, headers):
                _take(answer, chunk, perf_counter() - began)
        answer.seconds = perf_counter() - began
        answer.tokens = answer.tokens or answer.pieces
        return answer


def _take(answer: Answer, chunk: dict[str, Any], seconds: float) -> None:
    """One chunk of a stream: its text, and what a server of ours says of its work."""
    if "error" in chunk:
        answer.status = 500
    answer.timings = chunk.get("timings", answer.timings)
    if usage := chunk.get("usage"):
        answer.tokens = usage["completion_tokens"]
    for choice in chunk.get("choices", ()):
        if choice["delta"].get("content"):
            answer.first = seconds if answer.first is None else answer.first
            answer.pieces += 1
