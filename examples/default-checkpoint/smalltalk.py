"""Small talk with written answers: greetings, thanks, farewells, who are you.

smalltalk.toml has the wordings, data/smalltalk.reserved.json those of held-out rows, which
`python smalltalk.py` drew by lot, once.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import arithmetic
import tomllib

HERE = Path(__file__).parent
INTENTS: dict[str, dict[str, str | list[str]]] = tomllib.loads((HERE / "smalltalk.toml").read_text())
RESERVED = HERE / "data" / "smalltalk.reserved.json"
NUM_RESERVED = 50
PLAIN = ("hello", "hi", "hey")  # what most people type first: always trained on
ENDS = ("", "", "!", ".", "?")


def plain(text: str) -> str:
    """A wording without case and punctuation at its end."""
    return text.lower().rstrip("!.?")


def draw() -> list[list[str]]:
    """Pairs of intent and wording for the held-out rows, by lot over all wordings."""
    pairs = [
        [name, wording]
        for name, intent in INTENTS.items()
        for wording in intent["wordings"]
        if wording not in PLAIN
    ]
    return sorted(random.Random("smalltalk").sample(pairs, NUM_RESERVED))


def _ended(rng: random.Random, intent: str, wording: str) -> str:
    question = intent in ("how", "name", "human", "can") or wording.startswith(
        ("are you", "do you", "can you", "is ")
    )
    wording = wording[0].upper() + wording[1:] if rng.random() < 0.5 else wording
    return wording + rng.choice(("", "?", "?") if question else ("", "!", "."))


def turn(rng: random.Random, intent: str, wording: str) -> tuple[str, str]:
    """What is said, in some case and with some mark at its end, and the answer."""
    name = rng.choice(arithmetic.NAMES)
    said = _ended(rng, intent, wording.format(name=name))
    return said, INTENTS[intent]["answer"].format(name=name)


def drawn(rng: random.Random, *intents: str) -> tuple[str, str]:
    """One turn of training, of these intents or of any."""
    reserved = {wording for _, wording in json.loads(RESERVED.read_text())}
    intent = rng.choice(
        intents or (*INTENTS, "greeting", "greeting", "greeting", "name", "thanks", "how", "can")
    )
    return turn(rng, intent, rng.choice([w for w in INTENTS[intent]["wordings"] if w not in reserved]))


def held_out() -> list[tuple[str, str]]:
    """What is said in the held-out rows, and the answers."""
    pairs = json.loads(RESERVED.read_text())
    return [turn(random.Random(f"held-out:{i}"), *pair) for i, pair in enumerate(pairs)]


if __name__ == "__main__":
    RESERVED.write_text(json.dumps(draw(), indent=0) + "\n")
