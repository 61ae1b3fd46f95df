"""A fleet of replicas behind one address: its processes, its faults, and the result of every request."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from serving import wire
from serving.server import family

REPLICA = b"ray::ServeReplica:mars:mars-model-"
BACK = 120.0  # seconds for a replica to come back


@dataclass(slots=True)
class Told:
    """All that one stream said. `broken`: how the connection failed, which is nobody's right."""

    status: int = 0
    text: str = ""
    names: set[str] = field(default_factory=set)
    ends: int = 0  # finish reasons and end marks: two of a whole answer
    code: str = ""  # of an error
    broken: str = ""
    cached: int = 0
    prompt: int = 0


def command(python: str, bundle: Path, replicas: str, threads: int, *more: str) -> list[str]:
    """The command of a fleet; `python` has the extra ray."""
    words = [python, "-m", "mars_export.cli", "serve", str(bundle), "--port", "{port}", "--ray"]
    return [*words, "--replicas", replicas, "--threads", str(threads), *more]


async def ask(port: int, body: dict[str, Any]) -> Told:
    """A streamed chat, whatever becomes of it."""
    told = Told()
    try:
        async with wire.connection(port) as (reader, writer):
            data = json.dumps({"stream": True, "stream_options": {"include_usage": True}, **body}).encode()
            writer.write(wire.head("POST", "/v1/chat/completions", len(data)) + data)
            told.status, headers = await wire.read_head(reader)
            async for line in wire.body_lines(reader, headers):
                if told.status != 200:
                    told.code = told.code or json.loads(line)["error"]["code"]
                elif line == b"data: [DONE]":
                    told.ends += 1
                elif line.startswith(b"data: "):
                    _take(told, json.loads(line[6:]))
    except (OSError, wire.Broken, asyncio.IncompleteReadError, ValueError) as error:
        told.broken = f"{type(error).__name__}: {error}"
    return told


def _take(told: Told, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        told.code = chunk["error"]["code"]
        return
    told.names.add(chunk["id"])
    for choice in chunk["choices"]:
        told.text += choice["delta"].get("content") or ""
        told.ends += choice["finish_reason"] is not None
    if usage := chunk.get("usage"):
        told.prompt = usage["prompt_tokens"]
        told.cached = usage["prompt_tokens_details"]["cached_tokens"]


def complaint(told: Told, expected: str) -> str:
    """What is wrong with it: nothing, if it is whole, or an error that came after a beginning of the text."""
    if told.broken:
        return told.broken
    if told.status == 200 and not told.code:
        if (told.text, told.ends, len(told.names)) == (expected, 2, 1):
            return ""
        return f"whole, but {told.ends} ends, {len(told.names)} names, or another text"
    is_clean = told.code == "replica_lost" and told.text and expected.startswith(told.text) and not told.ends
    return "" if is_clean else f"status {told.status}, code {told.code}, {len(told.text)} characters"


async def closed(port: int, asked: Sequence[dict[str, Any]], num_clients: int) -> list[Told]:
    """Answers in the order of the requests; `num_clients` ask at once."""
    answers: list[Told | None] = [None] * len(asked)
    left = iter(enumerate(asked))

    async def client() -> None:
        for number, body in left:
            answers[number] = await ask(port, body)

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return [told for told in answers if told is not None]


async def during(
    port: int, body: Callable[[int], dict[str, Any]], num_clients: int, work: Awaitable[Any]
) -> list[tuple[int, Told]]:
    """Numbers and answers of requests from before `work` until it is done; each client counts from its
    own.
    """
    answers: list[tuple[int, Told]] = []
    over = asyncio.Event()

    async def client(number: int) -> None:
        while not over.is_set():
            answers.append((number, await ask(port, body(number))))
            number += 1

    clients = [asyncio.create_task(client(i)) for i in range(num_clients)]
    try:
        await work
    finally:
        over.set()
        await asyncio.gather(*clients)
    return answers


def processes(pid: int, name: bytes = REPLICA) -> list[int]:
    """Replicas among the descendants of a process."""
    found = []
    for child in family(pid):
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if words.startswith(name):
            found.append(child)
    return sorted(found)


async def samples(port: int, metric: str) -> dict[str, float]:
    """What the page of metrics has of one, by its labels."""
    _, page = await wire.get(port, "/metrics")
    found = re.findall(rf"^{metric}(?:{{(.*)}})? (\S+)$", page, flags=re.MULTILINE)
    return {labels: float(value) for labels, value in found}


async def replicas(port: int) -> int:
    """How many answer."""
    return int(sum((await samples(port, "mars_front_replicas")).values()))


async def wait_for(port: int, number: int) -> float:
    """Until so many answer; the seconds that it took."""
    began = monotonic()
    while await replicas(port) != number:
        assert monotonic() - began < BACK, f"{number} replicas did not come back"
        await asyncio.sleep(0.2)
    return monotonic() - began


async def kill_one(port: int, pid: int, asked: Sequence[dict[str, Any]], clients: int, wait: float,
                   draw: random.Random) -> list[Told]:  # fmt: skip
    """All requests, while one replica is killed after `wait` seconds."""
    running = asyncio.create_task(closed(port, asked, clients))
    await asyncio.sleep(wait)
    os.kill(draw.choice(processes(pid)), signal.SIGKILL)
    return await running


def verdict(answers: Sequence[Told], expected: Sequence[str]) -> dict[str, Any]:
    """Counts of one round, and every complaint."""
    wrong = Counter(c for t, e in zip(answers, expected, strict=True) if (c := complaint(t, e)))
    whole = sum(told.status == 200 and not told.code and not told.broken for told in answers)
    return {
        "requests": len(answers), "whole": whole, "ended_by_an_error": sum(bool(t.code) for t in answers),
        "wrong": dict(wrong),
    }  # fmt: skip
