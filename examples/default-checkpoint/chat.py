"""What the chat rows ask: questions (topics x forms, questions.toml) and second turns; distill.py answers
them."""

from __future__ import annotations

import random
from pathlib import Path

import tomllib

FAMILIES: dict[str, dict[str, list[str]]] = tomllib.loads(
    (Path(__file__).parent / "questions.toml").read_text()
)
# What may follow an answer, whatever was asked; in held-out rows only.
FOLLOW_UPS = ("How so?", "Say it more simply.", "What does that mean for me?")
PER_FAMILY = {"free": 100, "reserved": 18}
NUM_FOLLOW_UPS = 40


def questions(held_out: bool) -> list[str]:
    """The questions of one side of the split, a number from each family, in a fixed shuffled order.

    Held-out ones have forms that no training question has, and a third of their topics are new, too.
    """
    rng = random.Random(7)
    side = "reserved" if held_out else "free"
    drawn: list[str] = []
    for family in FAMILIES.values():
        made: list[str] = []
        for index, topic in enumerate(family["topics"]):
            if index % 2 == 1 if held_out else index % 6 != 5:
                made += [form.format(x=topic) for form in family[side]]
        rng.shuffle(made)
        drawn += made[: PER_FAMILY[side]]
    drawn = [question[0].upper() + question[1:] for question in dict.fromkeys(drawn)]
    rng.shuffle(drawn)
    return drawn


def follow_ups(answered: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Second turns after some of these questions and answers: question, answer, the user's next text."""
    rng = random.Random(8)
    return [(question, answer, rng.choice(FOLLOW_UPS)) for question, answer in answered[:NUM_FOLLOW_UPS]]
