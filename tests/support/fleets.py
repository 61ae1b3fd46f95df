"""A fleet on a real Ray in a process of its own, and what its requests should get."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from serving import fleet
from serving.fleet import Told
from serving.server import Server

PYTHON = os.environ.get("MARS_RAY_PYTHON", "")  # of an environment with the extra ray
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

    @property
    def pid(self) -> int:
        return self.server.pid

    def kill(self, name: bytes) -> None:
        """Its process of that name."""
        [pid] = fleet.processes(self.pid, name)
        os.kill(pid, signal.SIGKILL)


def run(made: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(made, 400)

    return asyncio.run(bounded())


def chat(number: int, **fields: Any) -> dict[str, Any]:
    """One of ten requests, of some 300 tokens."""
    messages = [{"role": "user", "content": f"say {number % CHATS}"}]
    return {"messages": messages, "max_tokens": 300, "ignore_eos": True, **fields}


def check(answers: Sequence[Told], expected: Sequence[str]) -> dict[str, Any]:
    """Every request has one answer, which is right; the counts."""
    found = fleet.verdict(answers, [expected[i % CHATS] for i in range(len(answers))])
    assert found["wrong"] == {}, found
    return found


def program(code: str, *words: str, **environment: str) -> str:
    """What a program says in the Python that has Ray."""
    done = subprocess.run(
        [PYTHON, "-c", code, *words], capture_output=True, text=True, timeout=200, check=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    return done.stdout.strip()
