"""Small talk with written answers: greetings, thanks, farewells, who are you.

smalltalk.toml has the wordings of which `python smalltalk.py` drew the held-out ones once, at random
(data/smalltalk.reserved.json). smalltalk-more.toml has wordings for training only,
outside that draw.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import arithmetic
import tomllib

HERE = Path(__file__).parent
INTENTS: dict[str, dict[str, str | list[str]]] = tomllib.loads((HERE / "smalltalk.toml").read_text())
MORE: dict[str, dict[str, str | list[str]]] = tomllib.loads((HERE / "smalltalk-more.toml").read_text())
RESERVED = HERE / "data" / "smalltalk.reserved.json"
NUM_RESERVED = 50
PLAIN = ("hello", "hi", "hey")  # what most people type first: always trained on
QUESTIONS = ("how", "name", "human", "can", "languages", "where", "age", "now")
NAMES = (
    "Aisha", "Bao", "Carlos", "Dmitri", "Elif", "Fatima", "Giulia", "Hiro", "Ingrid", "Javier", "Kwame",
    "Lena", "Mehmet", "Ngozi", "Olga", "Priya", "Rafael", "Sofia", "Tariq", "Wei", "Yusuf", "Zainab",
    "Peter", "Julia",
)  # fmt: skip


def plain(text: str) -> str:
    """A wording without case and punctuation at its end."""
    return text.lower().rstrip("!.?")


def key(text: str) -> str:
    """A wording's letters and digits alone, to compare it with others."""
    return re.sub(r"[^a-z0-9{}]", "", text.lower())


def trained() -> dict[str, list[str]]:
    """The wordings to train on, by intent: those that equal no held-out one of any intent."""
    reserved = {key(wording) for _, wording in json.loads(RESERVED.read_text())}
    return {
        name: [
            wording
            for source in (INTENTS, MORE)
            for wording in source.get(name, {}).get("wordings", ())
            if (key(wording) or wording) not in reserved
        ]
        for name in {**INTENTS, **MORE}
    }


TRAINED = trained()


def draw() -> list[list[str]]:
    """Pairs of intent and wording for the held-out rows, at random from all wordings."""
    pairs = [
        [name, wording]
        for name, intent in INTENTS.items()
        for wording in intent["wordings"]
        if wording not in PLAIN
    ]
    return sorted(random.Random("smalltalk").sample(pairs, NUM_RESERVED))


def _ended(rng: random.Random, intent: str, wording: str) -> str:
    question = intent in QUESTIONS or wording.startswith(("are you", "do you", "can you", "is "))
    wording = wording[0].upper() + wording[1:] if rng.random() < 0.5 else wording
    return wording + rng.choice(("", "?", "?") if question else ("", "!", "."))


def turn(
    rng: random.Random, intent: str, wording: str, names: Sequence[str] = arithmetic.NAMES
) -> tuple[str, str]:
    """A user text, in random case and with random punctuation at its end, and the answer."""
    name = rng.choice(names)
    said = _ended(rng, intent, wording.format(name=name))
    return said, (INTENTS if intent in INTENTS else MORE)[intent]["answer"].format(name=name)


def drawn(rng: random.Random, *intents: str) -> tuple[str, str]:
    """One turn of training, of these intents or of any."""
    intent = rng.choice(
        intents
        or (*TRAINED, "greeting", "greeting", "greeting", "name", "name", "thanks", "how", "how", "can")
    )
    said, answer = turn(rng, intent, rng.choice(TRAINED[intent]), (*arithmetic.NAMES, *NAMES))
    kind = rng.random()
    return said.lower() if kind < 0.15 else said.upper() if kind < 0.18 else said, answer


def held_out() -> list[tuple[str, str]]:
    """The user texts of the held-out rows, and the answers."""
    pairs = json.loads(RESERVED.read_text())
    return [turn(random.Random(f"held-out:{i}"), *pair) for i, pair in enumerate(pairs)]


if __name__ == "__main__":
    RESERVED.write_text(json.dumps(draw(), indent=0) + "\n")
