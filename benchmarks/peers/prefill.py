"""Prompts of a given length: how many tokens a second each system reads until its first new token."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from time import sleep
from typing import Any

from peers.process import Process
from peers.protocol import Request
from peers.rows import Prompts

PAUSE = 0.3  # seconds; threads of ONNX Runtime spin for a while after a step, on the next system's cores


def texts(prompts: Prompts, length: int, count: int) -> Iterator[list[int]]:
    """`count` prompts of `length` tokens; no two begin alike."""
    draw = random.Random(17)
    rows = [list(ids) for ids in prompts.ids]
    for number in range(count):
        draw.shuffle(rows)
        ids = [token for row in rows * (length // min(map(len, rows)) + 2) for token in row]
        # Rows of one task begin with one system message: a text begins somewhere within.
        yield ids[number + 1 : number + 1 + length]


def measure(
    processes: Mapping[str, Process], prompts: Prompts, lengths: Sequence[int], rounds: int
) -> dict[str, dict[str, float]]:
    """Tokens a second by system and length: medians of `rounds` prompts.

    Another system is first in each round; a round before them warms up.
    """
    names = list(processes)
    seconds: dict[str, dict[int, list[float]]] = {name: {n: [] for n in lengths} for name in names}
    for length in lengths:
        for number, ids in enumerate(texts(prompts, length, rounds + 1)):
            for name in [*names[number % len(names) :], *names[: number % len(names)]]:
                sleep(PAUSE)
                reply = processes[name].answer(Request(ids, 1, list(prompts.eos), prompts.mask, {}))
                if number:
                    seconds[name][length].append(reply.first_seconds)
    return {
        name: {str(length): round(length / median(found), 1) for length, found in of.items()}
        for name, of in seconds.items()
    }


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    lengths = list(next(iter(found.values())))
    lines = ["| tokens/s of a prompt | " + " | ".join(lengths) + " |", "|---|" + "---|" * len(lengths)]
    for name, rates in found.items():
        lines.append(f"| {name} | " + " | ".join(f"{rates[length]:,.0f}" for length in lengths) + " |")
    return "\n".join(lines)
