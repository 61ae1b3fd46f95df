"""General questions with short answers: topics x question forms, from questions.toml. Knows the questions,
not the answers (see distill.py)."""

from __future__ import annotations

import random
from pathlib import Path

import tomllib

FAMILIES: dict[str, dict[str, list[str]]] = tomllib.loads(
    (Path(__file__).parent / "questions.toml").read_text()
)


def questions(held_out: bool) -> list[str]:
    """Every question of one side of the split, in a fixed shuffled order.

    Held-out ones have forms that no training question has, and a third of their topics are new, too.
    """
    made: list[str] = []
    for family in FAMILIES.values():
        forms = family["reserved" if held_out else "free"]
        for index, topic in enumerate(family["topics"]):
            if index % 2 == 1 if held_out else index % 6 != 5:
                made += [form.format(x=topic) for form in forms]
    made = list(dict.fromkeys(made))
    random.Random(7).shuffle(made)
    return made
