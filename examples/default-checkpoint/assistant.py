"""The assistant task: free-worded requests to a home and phone assistant, answered by a JSON list of calls.

Knows how a request is put together; intents.toml has the intents and their wordings, slots.py the values in
them, phrases.py what stands around them. Each intent reserves some wordings: held-out rows use only those,
training rows never do.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib
from phrases import ENDINGS, FRAMES, GREETINGS, JOINS, OPENINGS
from slots import SLOTS

SYSTEM = "Reply with tool calls."


@dataclass(frozen=True, slots=True)
class Intent:
    """Wordings that all mean one call. `arguments` maps an argument to a slot ("{room}") or a constant."""

    name: str
    arguments: dict[str, str | int]
    wordings: tuple[str, ...]
    reserved: tuple[str, ...]


def _skill(table: dict[str, Any]) -> tuple[Intent, ...]:
    return tuple(
        Intent(t["name"], t["arguments"], tuple(t["wordings"]), tuple(t["reserved"])) for t in table["intent"]
    )


TABLES = tomllib.loads((Path(__file__).parent / "intents.toml").read_text())
SKILLS = tuple(_skill(table) for table in TABLES["skill"])

ORDERS = frozenset(TABLES["orders"])
FRAMED = 0.3  # of the requests that begin with an order
COUNTS = (1, 1, 1, 1, 1, 1, 2, 2, 2, 3)  # calls per held-out request
TRAIN_COUNTS = (
    1,
    1,
    1,
    2,
    2,
    2,
    3,
    3,
)  # more of the long ones: they are the harder ones, and pay for their prompt
ASK_SHARE = 0.12
PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Request:
    """A request, the JSON that answers it, and the wording of each of its clauses."""

    text: str
    answer: str
    wordings: tuple[str, ...]


def _clause(rng: random.Random, held_out: bool) -> tuple[str, dict[str, object], str]:
    skill = rng.choice(SKILLS)
    asks = [intent for intent in skill if intent.name == "ask"]
    tells = [intent for intent in skill if intent.name != "ask"]
    intent = rng.choice(asks) if asks and rng.random() < ASK_SHARE * 1.3 else rng.choice(tells)
    wording = rng.choice(intent.reserved if held_out else intent.wordings)
    drawn = {slot: SLOTS[slot](rng) for slot in dict.fromkeys(PLACEHOLDER.findall(wording))}
    text = PLACEHOLDER.sub(lambda match: drawn[match[1]][0], wording)
    arguments = {
        name: drawn[spec[1:-1]][1] if isinstance(spec, str) and spec.startswith("{") else spec
        for name, spec in intent.arguments.items()
    }
    return text, {"name": intent.name, "arguments": arguments}, wording


def request(rng: random.Random, held_out: bool) -> Request:
    """One request of one to three clauses."""
    clauses = [_clause(rng, held_out) for _ in range(rng.choice(COUNTS if held_out else TRAIN_COUNTS))]
    text = clauses[0][0]
    for index, (clause, *_) in enumerate(clauses[1:], start=2):
        text += (rng.choice(JOINS) if index == len(clauses) else ", ") + clause
    if text.split()[0] not in ORDERS:
        text = rng.choice(GREETINGS) + text
    elif rng.random() < FRAMED:
        text = rng.choice(FRAMES["reserved" if held_out else "free"]).format(text)
    else:
        text = rng.choice(OPENINGS) + text
    text += rng.choice([ending for ending in ENDINGS if ending.strip(" ,") not in text.split(" ")[-1:]])
    if rng.random() < 0.5:
        text = text[0].upper() + text[1:]
    return Request(text, json.dumps([call for _, call, _ in clauses]), tuple(w for *_, w in clauses))
