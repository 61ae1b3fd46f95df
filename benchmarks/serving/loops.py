"""Closed loops: clients that send one request after the other."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from serving import wire
from serving.figures import percentiles
from serving.wire import Answer

Ask = Callable[[dict[str, Any]], Awaitable[Answer]]


@dataclass
class Outcome:
    """Answers and failures of one loop. `seconds`: from the first request to the last answer."""

    answers: list[Answer] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def figures(self) -> dict[str, Any]:
        whole, seconds = [a for a in self.answers if a.status == 200], self.seconds or 1e-9
        made: dict[str, Any] = {
            "requests": len(self.answers) + sum(self.failures.values()),
            "whole": len(whole),
            "refused": dict(Counter(a.status for a in self.answers if a.status != 200)),
            "failed": dict(self.failures),
            "seconds": round(seconds, 2),
            "requests_per_second": round(len(whole) / seconds, 3),
            "tokens_per_second": round(sum(a.tokens for a in whole) / seconds, 2),
            "latency_s": percentiles([a.seconds for a in whole]),
            "first_token_s": percentiles([a.first for a in whole if a.first is not None]),
        }
        if any(a.timings for a in whole):
            forwards = sum(a.timings.get("forwards", 0) for a in whole)
            made["tokens_per_forward"] = round(sum(a.tokens for a in whole) / max(forwards, 1), 3)
            made["queue_ms"] = percentiles([a.timings.get("queue_ms", 0.0) for a in whole])
        return made


def asker(port: int, fields: dict[str, Any]) -> Ask:
    """Asks a server, with these fields beside the prompt."""
    usage = {"stream_options": {"include_usage": True}}
    return lambda request: wire.stream(port, {**usage, **request, **fields})


async def _one(ask: Ask, request: dict[str, Any], outcome: Outcome) -> None:
    try:
        outcome.answers.append(await ask(request))
    except (OSError, wire.Broken, asyncio.IncompleteReadError, ValueError) as error:
        outcome.failures[type(error).__name__] += 1


async def closed(ask: Ask, requests: Sequence[dict[str, Any]], num_clients: int) -> Outcome:
    """`num_clients` at once; each asks the next when it has its answer."""
    outcome, left = Outcome(), iter(requests)

    async def client() -> None:
        for request in left:
            await _one(ask, request, outcome)

    began = perf_counter()
    await asyncio.gather(*(client() for _ in range(num_clients)))
    outcome.seconds = perf_counter() - began
    return outcome
