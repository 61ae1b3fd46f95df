"""The behaviour of clients in a soak, good and bad. Each reports its result."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from serving import protocols, wire
from serving.protocols import CHAT

HI = [{"role": "user", "content": "hi"}]
# A refusal of a good request, because the server is full: 429, or 503 while it drains.
FULL = (429, 503)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request with fixed settings, and the content that it gets alone."""

    path: str
    body: dict[str, Any]
    alone: str

    @property
    def has_one_token_text(self) -> bool:
        """A chat in exact mode or one token a step: a change between the two leaves its text as it is."""
        return self.path == CHAT and set(self.body) <= {"messages", "max_tokens", "tau"}

    def judge(self, content: str, outcome: str, seconds: float | None = None) -> Told:
        if content == self.alone:
            return Told(outcome, None, seconds)
        settings = {
            name: value for name, value in self.body.items() if name not in ("messages", "input", "tools")
        }
        turns = self.body.get("messages") or self.body["input"]
        asked = f"{self.path} {settings} {turns[-1]['content'][:60]!r}"
        return Told(outcome, f"{asked}: {content!r} is not {self.alone!r}", seconds)


@dataclass(frozen=True, slots=True)
class Told:
    """What came of a request. `wrong`: what should not have happened. `retry`: seconds to wait."""

    outcome: str
    wrong: str | None = None
    seconds: float | None = None
    retry: float = 0.0


Habit = Callable[[int, Asked, random.Random], Awaitable[Told]]
Hear = Callable[[dict[str, Any]], Awaitable[None]]


async def _stream(port: int, asked: Asked, body: dict[str, Any], outcome: str, hear: Hear) -> Told:
    """A stream of any protocol to its end; `hear` is called with each event."""
    data, begun, found = json.dumps({**body, "stream": True}).encode(), perf_counter(), []
    async with wire.connection(port) as (reader, writer):
        writer.write(wire.head("POST", asked.path, len(data)) + data)
        status, headers = await wire.read_head(reader)
        if status in FULL:
            wait = headers.get("retry-after")
            wrong = None if wait else f"{status} without Retry-After"
            return Told("full", wrong, retry=min(1.0, float(wait or 1)))
        if status != 200:
            words = b"".join([line async for line in wire.body_lines(reader, headers)])
            return Told("error", f"status {status}: {words[:200]!r}")
        async for event in wire.events(reader, headers):
            found.append(event)
            await hear(event)
    return asked.judge(protocols.streamed_content(asked.path, found), outcome, perf_counter() - begun)


async def read(port: int, asked: Asked, _: random.Random) -> Told:
    async def hear(_: dict[str, Any]) -> None:
        pass

    return await _stream(port, asked, asked.body, "whole", hear)


async def plain(port: int, asked: Asked, _: random.Random) -> Told:
    """An answer in one piece."""
    begun = perf_counter()
    status, words = await wire.post(port, asked.path, json.dumps(asked.body).encode())
    if status != 200:
        return Told("full") if status in FULL else Told("error", f"status {status}: {words[:200]}")
    return asked.judge(protocols.content(asked.path, json.loads(words)), "whole", perf_counter() - begun)


async def leave(port: int, asked: Asked, draw: random.Random) -> Told:
    """Gone after some lines of the stream, or before the first."""
    data = json.dumps({**asked.body, "stream": True}).encode()
    async with wire.connection(port) as (reader, writer):
        writer.write(wire.head("POST", asked.path, len(data)) + data)
        for _ in range(draw.choice((0, 0, 8, 12, 20))):
            if not await reader.readline():
                break
        if draw.random() < 0.5:
            writer.transport.abort()  # a reset, not an end
    return Told("left")


async def steer(port: int, asked: Asked, draw: random.Random) -> Told:
    """One token a step, and exact from the third event on: the text is that of the two of them."""
    if not asked.has_one_token_text:
        return await read(port, asked, draw)
    heard, steered = 0, 0

    async def hear(event: dict[str, Any]) -> None:
        nonlocal heard, steered
        heard += 1
        if heard == 3:
            steered, _ = await wire.post(port, f"/v1/mars/streams/{event['id']}", b'{"exact": true}')

    told = await _stream(port, asked, asked.body | {"tau": 1}, "steered", hear)
    return told if steered in (0, 200, 404) else Told("error", f"a change of tau got {steered}")


async def slow(port: int, asked: Asked, draw: random.Random) -> Told:
    """Reads a little at a time. The others must not wait for it."""

    async def hear(_: dict[str, Any]) -> None:
        await asyncio.sleep(draw.uniform(0.0, 0.2))

    return await _stream(port, asked, asked.body, "slowly", hear)


# --- bad on purpose: a 4xx, or a closed door; never a 5xx and never an answer ---

BODIES: tuple[bytes, ...] = (
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"messages": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001,
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    *(
        json.dumps(body).encode()
        for body in (
            {},
            {"messages": []},
            {"messages": "hi"},
            {"messages": [{"role": "user"}]},
            {"messages": [{"role": 5, "content": "hi"}]},
            {"messages": [{"role": "user", "content": {"a": 1}}]},
            {"messages": HI, "model": "no such model"},
            {"messages": HI, "tau": "high"},
            {"messages": HI, "tau": -1},
            {"messages": HI, "tau": float("nan")},
            {"messages": HI, "tau": 0.9, "exact": True},
            {"messages": HI, "masks": -1},
            {"messages": HI, "max_tokens": 0},
            {"messages": HI, "max_tokens": -5},
            {"messages": HI, "temperature": float("inf")},
            {"messages": HI, "stop": ["x"] * 1000},
            {"messages": HI, "stream": "perhaps"},
            {"messages": HI, "profile": "no such profile"},
            {"messages": [{"role": "user", "content": "light " * 100_000}]},
        )
    ),
)
PATHS = (
    "/../../etc/passwd", "/v1/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd",
    "/v1/models/..%2f..", "/v1/mars/streams/../../x", "/v1/mars/streams/%00", "/\x7f",
    "/v1/chat/completions/", "/static/page.html", "/" + "a" * 8000,
)  # fmt: skip
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
RAW = (
    b"GET\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS on a plain port
    POST + b"Content-Length: -1\r\n\r\n",
    POST + b"Content-Length: 5\r\nContent-Length: 9\r\n\r\nhello",
    POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
    b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nBad\x00Header: y\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 300_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Many: y\r\n" * 20_000 + b"\r\n",
)


def _refused(status: int, what: str) -> Told:
    good = 400 <= status < 500
    return Told("refused", None if good else f"{what} got {status}")


async def malformed(port: int, _: Asked, draw: random.Random) -> Told:
    body = draw.choice(BODIES)
    status, words = await wire.post(port, CHAT, body)
    told = _refused(status, repr(body[:80]))
    if told.wrong is None and "error" not in json.loads(words):
        return Told("refused", f"{body[:80]!r}: {words[:80]!r} is not OpenAI's form")
    return told


async def path(port: int, _: Asked, draw: random.Random) -> Told:
    where = draw.choice(PATHS)
    status, _words = await wire.get(port, where)
    return _refused(status, repr(where[:80]))


async def raw(port: int, _: Asked, draw: random.Random) -> Told:
    """No HTTP, or nearly."""
    data = draw.choice(RAW)
    async with wire.connection(port) as (reader, writer):
        try:
            writer.write(data)
            line = await asyncio.wait_for(reader.readline(), 60)
        except ConnectionError:
            line = b""
        except asyncio.TimeoutError:
            return Told("refused", f"{data[:60]!r}: silence for a minute")
    if not line:
        return Told("shut out")
    return _refused(int(line.split()[1]), repr(data[:60]))


async def oversized(port: int, _: Asked, draw: random.Random) -> Told:
    """A body beyond every limit, announced or not."""
    size = draw.choice((5, 64)) << 20
    async with wire.connection(port) as (reader, writer):
        try:
            if draw.random() < 0.5:
                writer.write(wire.head("POST", CHAT, size))
                for _i in range(size >> 20):
                    writer.write(b" " * (1 << 20))
                    await asyncio.wait_for(writer.drain(), 30)
            else:
                chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
                writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n")
                for _i in range(size >> 20):
                    writer.write(chunk)
                    await asyncio.wait_for(writer.drain(), 30)
            line = await asyncio.wait_for(reader.readline(), 60)
        except ConnectionError:
            return Told("shut out")  # it did not wait for the rest
        except asyncio.TimeoutError:
            return Told("refused", "an oversized body: silence")
    return _refused(int(line.split()[1]), f"a body of {size} bytes") if line else Told("shut out")


async def dribble(port: int, _: Asked, draw: random.Random) -> Told:
    """Slowloris: a byte now and then, of the head or of the body, until it is shut out or has had enough."""
    head = wire.head("POST", CHAT, 100) if draw.random() < 0.5 else wire.head("POST", CHAT, 100)[:-2]
    patience = draw.uniform(2, 20)
    async with wire.connection(port) as (reader, writer):
        try:
            writer.write(head)
            loop = asyncio.get_running_loop()
            until = loop.time() + patience
            while loop.time() < until and not reader.at_eof():
                writer.write(b" " if head.endswith(b"\r\n\r\n") else b"X-A: b\r\n")
                await writer.drain()
                await asyncio.sleep(0.3)
        except ConnectionError:
            return Told("shut out")
    return Told("shut out" if reader.at_eof() else "gave up")


HABITS: dict[str, tuple[Habit, float]] = {
    "read": (read, 0.42),
    "plain": (plain, 0.12),
    "leave": (leave, 0.14),
    "steer": (steer, 0.06),
    "slow": (slow, 0.04),
    "malformed": (malformed, 0.12),
    "path": (path, 0.04),
    "raw": (raw, 0.04),
    "oversized": (oversized, 0.01),
    "dribble": (dribble, 0.01),
}
