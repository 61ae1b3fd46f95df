"""The arithmetic task: word problems of one to four steps, answered with the steps written out and `#### n`
at the end.

Knows stories and how a step is written; sentences.toml has the wordings, some of each kind reserved for
held-out rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tomllib

NAMES = (
    "Tom",
    "Ana",
    "Ben",
    "Lily",
    "Max",
    "Sara",
    "Omar",
    "Nina",
    "Leo",
    "Kate",
    "Sam",
    "Mia",
    "Jack",
    "Emma",
    "Ali",
    "Rosa",
    "Paul",
    "Ivy",
    "Dan",
    "Zoe",
)
ITEMS = (
    "apples",
    "pens",
    "books",
    "stickers",
    "marbles",
    "cookies",
    "shells",
    "coins",
    "cards",
    "eggs",
    "stamps",
    "balloons",
    "pencils",
    "candies",
    "oranges",
    "buttons",
    "flowers",
    "toys",
    "photos",
    "stones",
)
BOXES = ("boxes", "bags", "packs", "baskets", "jars", "trays", "crates", "tins")
LIMIT = 40  # no sum is larger

THINGS = ("cup", "hat", "lamp", "bag", "map", "bowl", "ball", "scarf", "mug", "kite")

SENTENCES: dict[str, dict[str, list[str]]] = tomllib.loads(
    (Path(__file__).parent / "sentences.toml").read_text()
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A word problem, its worked answer and the final number."""

    text: str
    answer: str
    result: int


class Story:
    """The sentences of one problem, the steps of its answer and the running total."""

    def __init__(self, rng: random.Random, held_out: bool) -> None:
        self.rng, self.held_out = rng, held_out
        name, other = rng.sample(NAMES, 2)
        self.words = {
            "name": name,
            "other": other,
            "items": rng.choice(ITEMS),
            "boxes": rng.choice(BOXES),
            "thing": rng.choice(THINGS),
        }
        self.told: list[str] = []
        self.steps: list[str] = []
        self.total = 0

    def tell(self, what: str, **numbers: int) -> None:
        sentence = self.rng.choice(SENTENCES[what]["reserved" if self.held_out else "free"])
        sentence = sentence.format(**self.words, **numbers)
        self.told.append(sentence[0].upper() + sentence[1:])

    def start(self, n: int) -> None:
        self.total = n
        self.steps.append(f"Start with {n} {self.words['items']}.")

    def product(self, m: int, n: int) -> None:
        self.total = m * n
        self.steps.append(f"Start with {m} * {n} = {m * n} {self.words['items']}.")

    def step(self, label: str, sign: str, n: int, result: int) -> None:
        self.steps.append(f"{label} {n}: {self.total} {sign} {n} = {result}.")
        self.total = result

    def add(self, n: int) -> None:
        self.step("Add", "+", n, self.total + n)

    def take(self, n: int) -> None:
        self.step("Take", "-", n, self.total - n)

    def problem(self) -> Problem:
        return Problem(" ".join(self.told), " ".join([*self.steps, f"#### {self.total}"]), self.total)


def small(rng: random.Random) -> tuple[int, int]:
    return rng.randint(2, 5), rng.randint(2, 6)


def begin(story: Story) -> None:
    rng = story.rng
    if rng.random() < 0.4:
        m, n = small(rng)
        story.tell("groups", m=m, n=n)
        story.product(m, n)
    else:
        n = rng.randint(5, 20)
        story.tell("start", n=n)
        story.start(n)


def event(story: Story) -> None:
    rng = story.rng
    if story.total % 2 == 0 and rng.random() < 0.15:
        story.tell("half")
        story.step("Split by", "/", 2, story.total // 2)
    elif story.total <= LIMIT // 2 and rng.random() < 0.1:
        story.tell("double")
        story.step("Times", "*", 2, story.total * 2)
    elif story.total > LIMIT - 9 or (story.total > 3 and rng.random() < 0.5):
        n = rng.randint(2, min(9, story.total - 1))
        story.tell("take", n=n)
        story.take(n)
    else:
        n = rng.randint(2, 9)
        story.tell("add", n=n)
        story.add(n)


def _collection(story: Story) -> None:
    """A pile that grows and shrinks, once or twice, and may be shared at the end."""
    begin(story)
    grouped = "*" in story.steps[0]
    for _ in range(story.rng.choice((1, 2)) if grouped else 2):
        event(story)
    parts = [n for n in range(2, 10) if story.total % n == 0 and 2 <= story.total // n <= 9]
    if parts and story.rng.random() < 0.4:
        n = story.rng.choice(parts)
        story.tell("split", n=n)
        story.step("Split by", "/", n, story.total // n)
    else:
        story.tell("ask")


def _shopping(story: Story) -> None:
    """Some things at one price, something else, perhaps a discount."""
    rng = story.rng
    m, n = small(rng)
    story.tell("price", m=m, n=n)
    story.words["items"], items = "dollars", story.words["items"]
    story.product(m, n)
    story.words["items"] = items
    n = rng.randint(2, 9)
    story.tell("extra", n=n)
    story.add(n)
    if rng.random() < 0.5:
        n = rng.randint(2, min(9, story.total - 1))
        story.tell("coupon", n=n)
        story.take(n)
    story.tell("ask_cost")


def _pair(story: Story) -> None:
    """Two people, one with some more, counted together."""
    n, more = story.rng.randint(3, 12), story.rng.randint(2, 9)
    story.tell("start", n=n)
    story.start(n)
    story.tell("more", n=more)
    story.add(more)
    story.tell("ask_both")
    story.add(n)


def _relation(story: Story) -> None:
    """One person's number, told by another's; perhaps something happens to it."""
    n, by = story.rng.randint(4, 20), story.rng.randint(2, 9)
    story.tell("base", n=n)
    story.start(n)
    kind = story.rng.choice(("above", "below", "twice"))
    if kind == "twice":
        story.tell("twice")
        story.step("Times", "*", 2, story.total * 2)
    elif kind == "above" or by >= n:
        story.tell("above", n=by)
        story.add(by)
    else:
        story.tell("below", n=by)
        story.take(by)
    if story.total > 1 and story.rng.random() < 0.4:
        event(story)
    story.tell("ask_one")


SCENES: tuple[Callable[[Story], None], ...] = (
    _collection,
    _collection,
    _collection,
    _shopping,
    _pair,
    _relation,
)


def problem(rng: random.Random, held_out: bool) -> Problem:
    """One word problem."""
    story = Story(rng, held_out)
    rng.choice(SCENES)(story)
    return story.problem()
