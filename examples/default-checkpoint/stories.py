"""Word problems to train on only, in whole texts (stories.toml), answered as in arithmetic.py."""

from __future__ import annotations

import random
import re
from pathlib import Path

import tomllib
from arithmetic import ITEMS, Problem

STORIES = tomllib.loads((Path(__file__).parent / "stories.toml").read_text())["story"]
PEOPLE = {
    "he": "Carlos Kwame Hiro Mehmet Rafael Javier Dmitri Tariq Ravi Kofi Liam Noah Ahmed Diego Pavel Finn",
    "she": "Aisha Priya Ingrid Fatima Giulia Ngozi Mei Sofia Elif Yuki Amara Leila Hannah Chloe Olga Carmen",
}
HIS = {"he": "his", "she": "her"}
WORDS = {
    "cur": ("dollars", "dollars", "euros", "pounds"),
    "dist": ("kilometers", "miles", "km"),
    "thing": ("book", "hat", "lamp", "mug", "ball"),
    "thing2": ("scarf", "pizza", "ticket", "kite", "notebook"),
    "items": (*ITEMS, "bananas", "muffins", "tomatoes", "lemons", "beads", "crayons", "cupcakes", "mangoes"),
    "people": ("people", "children", "students", "guests", "visitors"),
    "wear": ("socks", "shoes", "gloves", "boots"),
}
ASIDES = (
    "It is {k} degrees today.", "{name} lives in house number {k}.", "{name} has {k} cousins.",
    "The shop is {k} minutes away.", "The bus to town is number {k}.",
)  # fmt: skip


def steps(lines: list[str], numbers: dict[str, int], words: dict[str, str]) -> tuple[list[str], int] | None:
    """The written steps and the result; None if a number is not a positive integer."""

    def value(token: str) -> int:
        digits = token.rstrip("0") if token[0].isalpha() else token
        return numbers[digits] * 10 ** (len(token) - len(digits)) if digits in numbers else int(token)

    first, *rest = lines
    *start, unit = first.format(**words).split()
    total = value(start[0])
    if len(start) == 3:
        m, n = total, value(start[2])
        total = m * n
        told = [f"Start with {m} * {n} = {total} {unit}."]
    else:
        told = [f"Start with {total} {unit}."]
    for line in rest:
        sign, *terms = line.split()
        n, before, shown = value(terms[0]), total, ""
        if len(terms) == 3:
            m, n = n, n * value(terms[2])
            shown = f"{m} * {value(terms[2])} = "
        if sign == "/" and total % n:
            return None
        total = {"+": total + n, "-": total - n, "*": total * n, "/": total // n, "from": n - total}[sign]
        label = {"+": "Add", "-": "Take", "*": "Times", "/": "Split by", "from": "Take from"}[sign]
        left, right = (n, before) if sign == "from" else (before, n)
        told.append(f"{label} {shown}{n}: {left} {sign if sign != 'from' else '-'} {right} = {total}.")
        if total < 1:
            return None
    return (told, total) if total > 1 else None


def problem(rng: random.Random) -> Problem:
    """One word problem."""
    story = rng.choice(STORIES)
    he = rng.choice(tuple(PEOPLE))
    name = rng.choice(PEOPLE[he].split())
    other = rng.choice([n for names in PEOPLE.values() for n in names.split() if n != name])
    words = {kind: rng.choice(choices) for kind, choices in WORDS.items()}
    words |= {"name": name, "other": other, "he": he, "He": he.title(), "his": HIS[he]}
    solved = None
    while solved is None:
        numbers = {letter: rng.randint(*story[letter]) for letter in "abcd" if letter in story}
        solved = steps(story["steps"], numbers, words)
    text = rng.choice(story["texts"]).format(**words, **numbers)
    if rng.random() < 0.15 and f"{name} " in text:
        aside = rng.choice(ASIDES).format(k=rng.randint(2, 30), **words)
        text = (
            f"{aside} {text}" if rng.random() < 0.5 else re.sub(r"(?<=[.]) (?=[^.]*\?$)", f" {aside} ", text)
        )
    text = text[0].upper() + text[1:]
    if words["cur"] == "dollars" and rng.random() < 0.3:
        text = re.sub(r"\b(\d+) dollars", r"$\1", text)
    if rng.random() < 0.06:
        text = text.lower()
    told, total = solved
    return Problem(text, " ".join([*told, f"#### {total}"]), total)
