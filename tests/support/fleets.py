"""A fleet on a real Ray in a process of its own, and what its requests should get."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from serving import wire
from serving.server import Server, family

PYTHON = os.environ.get("MARS_RAY_PYTHON", "")  # of an environment with the extra ray
REPLICA = b"ray::ServeReplica:mars:mars"
BACK = 120.0  # seconds for a replica to come back
CHATS = 10
T = TypeVar("T")


@dataclass
class Fleet:
    """One that runs, and what its requests should get."""

    server: Server
    bundle: Path
    expected: Sequence[str]

    @property
    def port(self) -> int:
        return self.server.port

    def processes(self, name: bytes = REPLICA) -> list[int]:
        """Its processes of that name."""
        return sorted(pid for pid in family(self.server.pid) if _command(pid).startswith(name))


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


@dataclass(slots=True)
class Told:
    """All that one stream said. `broken`: how its connection failed."""

    status: int = 0
    text: str = ""
    ends: int = 0  # finish reasons and end marks: two of a whole answer
    broken: str = ""
    cached: int = 0
    error: str = ""  # the body of a refusal
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return (self.status, self.ends, self.broken) == (200, 2, "")


def command(bundle: Path, *more: str) -> list[str]:
    return [PYTHON, "-m", "mars_export.cli", "serve", str(bundle), "--threads", "1", *more]


def run(made: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(made, 400)

    return asyncio.run(bounded())


def chat(number: int, **fields: Any) -> dict[str, Any]:
    """One of ten requests, of some 300 tokens."""
    messages = [{"role": "user", "content": f"say {number % CHATS}"}]
    return {"messages": messages, "max_tokens": 300, "ignore_eos": True, **fields}


async def ask(port: int, body: dict[str, Any], session: str = "") -> Told:
    """A streamed chat, whatever becomes of it."""
    told = Told()
    try:
        async with wire.connection(port) as (reader, writer):
            data = json.dumps({"stream": True, "stream_options": {"include_usage": True}, **body}).encode()
            head = wire.head("POST", "/v1/chat/completions", len(data))
            if session:
                head = head.replace(b"\r\n", f"\r\nx-session-id: {session}\r\n".encode(), 1)
            writer.write(head + data)
            told.status, told.headers = await wire.read_head(reader)
            async for line in wire.body_lines(reader, told.headers):
                if told.status != 200:
                    told.error += line.decode()
                elif line == b"data: [DONE]":
                    told.ends += 1
                elif line.startswith(b"data: "):
                    _take(told, json.loads(line[6:]))
    except (OSError, wire.Broken, asyncio.IncompleteReadError, ValueError) as error:
        told.broken = f"{type(error).__name__}: {error}"
    return told


def _take(told: Told, chunk: dict[str, Any]) -> None:
    for choice in chunk["choices"]:
        told.text += choice["delta"].get("content") or ""
        told.ends += choice["finish_reason"] is not None
    if usage := chunk.get("usage"):
        told.cached = usage["prompt_tokens_details"]["cached_tokens"]


async def closed(port: int, numbers: Sequence[int], num_clients: int) -> list[Told]:
    """Answers to chats of these numbers, in their order; `num_clients` ask at once."""
    answers = dict.fromkeys(range(len(numbers)), Told())
    left = iter(enumerate(numbers))

    async def client() -> None:
        for at, number in left:
            answers[at] = await ask(port, chat(number))

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return list(answers.values())


def check(answers: Sequence[Told], expected: Sequence[str]) -> None:
    """All are whole, and right."""
    wrong = [told for i, told in enumerate(answers) if not told.is_whole or told.text != expected[i % CHATS]]
    assert not wrong, wrong[:3]


async def samples(port: int, metric: str) -> dict[str, float]:
    """A metric of each replica, from the page of all."""
    status, page = await wire.get(port, "/metrics")
    found = re.findall(rf'^{metric}{{.*replica="(\w+)".*}} (\S+)$', page, flags=re.MULTILINE)
    return {replica: float(value) for replica, value in found} if status == 200 else {}


async def wait_for(port: int, number: int) -> None:
    """Until so many replicas answer."""
    until = monotonic() + BACK
    while len(await samples(port, "mars_num_requests_running")) != number:
        assert monotonic() < until, f"{number} replicas did not come back"
        await asyncio.sleep(0.2)


def program(code: str, **environment: str) -> str:
    """What a program says in the Python that has Ray."""
    done = subprocess.run(
        [PYTHON, "-c", code], capture_output=True, text=True, timeout=200, check=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    return done.stdout.strip()
