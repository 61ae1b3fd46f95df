"""Prompts of a given length: how many tokens a second each system reads until its first new token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from peers.protocol import Request
from peers.rounds import Answers
from peers.rows import Prompts
from peers.turns import talks


def measure(
    processes: Mapping[str, Answers], prompts: Prompts, lengths: Sequence[int], rounds: int
) -> dict[str, dict[str, float]]:
    """Tokens a second by system and length: medians of `rounds` prompts, no two of which begin alike.

    Another system is first in each round; a round before them warms up.
    """
    names = list(processes)
    seconds: dict[str, dict[int, list[float]]] = {name: {n: [] for n in lengths} for name in names}
    for length in lengths:
        for number, (ids, _) in enumerate(talks(prompts, length, rounds + 1)):
            for name in [*names[number % len(names) :], *names[: number % len(names)]]:
                reply = processes[name].answer(Request([ids], [1], list(prompts.eos), prompts.mask, {}))
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
