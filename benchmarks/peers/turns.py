"""The second turn of a conversation: a history is read and answered, then a question after it.

Every system keeps what it has read: mars-export in its prefix cache, llama.cpp in its context.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from peers.protocol import Request
from peers.rounds import Answers
from peers.rows import Prompts

ANSWER, QUESTION = 32, 30  # tokens
KEEPING: Mapping[str, Any] = {"cache_bytes": 1 << 30, "context": 4096}
"""Options of a program that is to keep what it read."""


def takes_part(name: str) -> bool:
    return name.startswith(("ours", "llama.cpp"))


@dataclass(frozen=True, slots=True)
class Turns:
    """Seconds to the first token of the first turns and of the second ones."""

    first: list[float]
    second: list[float]

    def to_dict(self) -> dict[str, Any]:
        return {
            "first_turn_s": median(self.first),
            "second_turn_s": median(self.second),
            "rounds": len(self.second),
        }


def talks(prompts: Prompts, length: int, rounds: int) -> list[tuple[list[int], list[int]]]:
    """A history of `length` tokens and a question for each round; no two begin alike."""
    draw, made = random.Random(17), []
    rows = [list(ids) for ids in prompts.ids]
    for number in range(rounds):
        draw.shuffle(rows)
        ids = [token for row in rows * (length // min(map(len, rows)) + 2) for token in row]
        # Rows of one task begin with one system message: a talk begins somewhere within.
        start = number + 1
        made.append((ids[start : start + length], ids[start + length : start + length + QUESTION]))
    return made


def measure(processes: Mapping[str, Answers], prompts: Prompts, length: int, rounds: int) -> dict[str, Turns]:
    """Both turns of each system, another one first in each round; the first round warms up."""
    names: Sequence[str] = [name for name in processes if takes_part(name)]
    found = {name: Turns([], []) for name in names}
    for number, (history, question) in enumerate(talks(prompts, length, rounds + 1)):
        for name in [*names[number % len(names) :], *names[: number % len(names)]]:
            settings = {} if name.startswith("ours") else {"keep": True}

            def ask(ids: list[int], limit: int, name: str = name, settings: Any = settings) -> Any:
                return processes[name].answer(Request([ids], [limit], [], prompts.mask, settings))

            one = ask(history, ANSWER)
            two = ask([*history, *one.token_ids[0], *question], 1)
            if number:
                found[name].first.append(one.first_seconds)
                found[name].second.append(two.first_seconds)
    return found


def table(found: Mapping[str, Turns]) -> str:
    lines = ["| system | first turn, s | second turn, s | ratio |", "|---|---|---|---|"]
    for name, turns in found.items():
        one, two = median(turns.first), median(turns.second)
        lines.append(f"| {name} | {one:.3f} | {two:.3f} | {two / one:.3f} |")
    return "\n".join(lines)
