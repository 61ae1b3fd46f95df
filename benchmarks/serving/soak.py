"""A soak: clients of every habit for minutes or hours. Every whole answer is compared with that of a single
request, and memory is watched. The journal has one line for each interval.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from serving import protocols, wire
from serving.figures import growth, percentiles
from serving.habits import HABITS, Asked, Told
from serving.server import Server

MAX_WRONG = 50  # kept in words; all are counted
MAX_DRIBBLES = 16  # clients that dribble at once


async def references(port: int, chats: Sequence[dict[str, Any]]) -> list[Asked]:
    """Every chat alone, in one of the three protocols, one after the other."""
    found = []
    for path, body in protocols.requests(chats):
        status, words = await wire.post(port, path, json.dumps(body).encode())
        if status != 200:
            raise SystemExit(f"error: alone, {path} {body} got {status}: {words}")
        found.append(Asked(path, body, protocols.content(path, json.loads(words))))
    return found


@dataclass
class Soak:
    """Ends after both `requests` and `seconds`. `rate`: requests a second of all clients; 0 for no limit."""

    server: Server
    asked: list[Asked]
    num_clients: int
    requests: int
    seconds: float
    seed: int
    journal: Path
    every: float = 10.0
    rate: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.num_wrong = self._started = self._dribbling = 0
        self._begun = perf_counter()
        self._all: list[float] = []
        self._recent: list[float] = []
        self._memory: list[tuple[float, int]] = []
        self._files: list[int] = []
        self._cpu_before = self.server.cpu_seconds

    async def run(self) -> dict[str, Any]:
        self._over = asyncio.Event()
        loop = asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, self._over.set)
        writer = asyncio.create_task(self._write())
        await asyncio.gather(*(self._client(i) for i in range(self.num_clients)))
        self._over.set()
        await writer
        return await self._result()

    @property
    def _is_over(self) -> bool:
        enough = self._started >= self.requests and perf_counter() - self._begun >= self.seconds
        return enough or self._over.is_set() or not self.server.is_alive

    async def _client(self, number: int) -> None:
        draw = random.Random(f"{self.seed} {number}")
        names, weights = list(HABITS), [weight for _, weight in HABITS.values()]
        while not self._is_over:
            if self.rate:
                await asyncio.sleep(draw.expovariate(self.rate / self.num_clients))
            name = draw.choices(names, weights)[0]
            if name == "dribble" and self._dribbling >= MAX_DRIBBLES:
                continue
            self._started += 1
            self._dribbling += name == "dribble"
            try:
                told = await HABITS[name][0](self.server.port, draw.choice(self.asked), draw)
            except (OSError, wire.Broken, asyncio.IncompleteReadError, ValueError, IndexError) as error:
                told = Told("broken", f"{type(error).__name__}: {error}")
            finally:
                self._dribbling -= name == "dribble"
            self._note(name, told)
            await asyncio.sleep(told.retry * draw.random())

    def _note(self, name: str, told: Told) -> None:
        self.counts[f"{name}: {told.outcome}"] += 1
        if told.seconds is not None:
            self._all.append(told.seconds)
            self._recent.append(told.seconds)
        if told.wrong is not None:
            self.num_wrong += 1
            if len(self.wrong) < MAX_WRONG:
                self.wrong.append(f"{name}: {told.wrong}")

    async def _write(self) -> None:
        """A line of the journal for each interval."""
        self.journal.parent.mkdir(parents=True, exist_ok=True)
        with self.journal.open("a", encoding="utf-8") as out:
            last = False
            while not last:
                last = self._over.is_set()
                seconds, memory = perf_counter() - self._begun, self.server.memory
                if memory:
                    self._memory.append((seconds, memory))
                line = {
                    "seconds": round(seconds, 1),
                    "requests": sum(self.counts.values()),
                    "wrong": self.num_wrong,
                }
                line |= {"memory_mib": round(memory / 2**20, 1), "files": self.server.num_files}
                line |= {"cpu_seconds": self.server.cpu_seconds, "latency_s": percentiles(self._recent)}
                self._files.append(line["files"])
                self._recent.clear()
                print(json.dumps(line), file=out, flush=True)
                print(f"\r{line['seconds']:>8} s  {line['requests']} requests, {self.num_wrong} wrong,"
                      f" {line['memory_mib']} MiB, {line['files']} files ", end="", flush=True)  # fmt: skip
                try:
                    await asyncio.wait_for(self._over.wait(), self.every)
                except asyncio.TimeoutError:
                    continue
        print()

    async def _result(self) -> dict[str, Any]:
        seconds = perf_counter() - self._begun
        await self._quiet()
        times, sizes = [t for t, _ in self._memory], [m for _, m in self._memory]
        return {
            "seconds": round(seconds, 1),
            "clients": self.num_clients,
            "requests": sum(self.counts.values()),
            "requests_per_second": round(sum(self.counts.values()) / seconds, 2),
            "outcomes": dict(sorted(self.counts.items())),
            "wrong": self.num_wrong,
            "wrong_words": self.wrong,
            "latency_s": percentiles(self._all),
            "memory": growth(times, sizes),
            "open_files": {"first": self._files[0], "most": max(self._files), "last": self.server.num_files},
            "cpu_share": round((self.server.cpu_seconds - self._cpu_before) / seconds, 3),
            "server_alive": self.server.is_alive,
        }

    async def _quiet(self) -> None:
        """The server has nothing left to do soon after its clients have gone: nothing is lost in it."""
        busy: dict[str, float] = {}
        for _ in range(100):
            try:
                _, text = await wire.get(self.server.port, "/metrics")
            except (OSError, wire.Broken) as error:
                self._note("end", Told("broken", f"/metrics: {type(error).__name__}"))
                return
            found = re.findall(r"^(mars_num_requests_\w+)\{.*\} (\S+)$", text, re.MULTILINE)
            busy = {name: float(value) for name, value in found}
            if busy and not any(busy.values()):
                return
            await asyncio.sleep(0.1)
        self._note("end", Told("busy", f"10 s after the last client: {busy}"))
