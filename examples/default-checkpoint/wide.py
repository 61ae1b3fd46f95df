"""Word problems as people put them: other events, the question first, numbers that do not matter, words for
numbers, `he`, `she` and `I`. Answered as those of arithmetic.py are."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import stories
from arithmetic import ITEMS, LIMIT, SCENES, THINGS, Problem, Story, begin, event, small

MORE_ITEMS = (
    "bananas", "chocolates", "crayons", "seeds", "muffins", "pears", "toy cars", "beads", "nuts", "tickets",
    "lemons", "rocks", "sandwiches", "cupcakes", "plums", "bottles", "leaves", "tomatoes",
    "comics", "puzzles",
)  # fmt: skip
MORE_THINGS = ("book", "sandwich", "ticket", "toy", "coffee", "pizza", "shirt", "plant", "cake", "game")
WORK = (
    ("read", "pages"), ("run", "kilometers"), ("earn", "dollars"), ("save", "dollars"), ("collect", "eggs"),
    ("bake", "cakes"), ("plant", "trees"), ("clean", "windows"), ("write", "letters"), ("walk", "miles"),
    ("paint", "chairs"), ("drink", "glasses of water"), ("sell", "tickets"), ("make", "sandwiches"),
    ("pick", "apples"), ("repair", "bikes"), ("fold", "shirts"), ("learn", "words"),
)  # fmt: skip
PEOPLE = (
    "people", "children", "students", "birds", "passengers", "guests", "ducks", "players", "cars", "visitors",
)  # fmt: skip
PLACES = (
    "on the bus", "in the park", "in a room", "at the party", "on the train", "by the lake", "in the yard",
    "in the hall",
)  # fmt: skip
SHE = frozenset(("Ana", "Lily", "Sara", "Nina", "Kate", "Mia", "Emma", "Rosa", "Ivy", "Zoe"))
WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip


def _short(story: Story) -> None:
    """A pile and one event."""
    begin(story)
    grouped = "*" in story.steps[0]
    parts = [n for n in range(2, 10) if story.total % n == 0 and 2 <= story.total // n <= 12]
    if grouped and story.rng.random() < 0.4:
        story.tell("ask")
    elif parts and story.rng.random() < 0.4:
        n = story.rng.choice(parts)
        story.tell("split", n=n)
        story.step("Split by", "/", n, story.total // n)
    else:
        event(story)
        story.tell("ask")


def _rate(story: Story) -> None:
    """So many an hour or a day, perhaps some more."""
    rng = story.rng
    story.words["verb"], story.words["items"] = rng.choice(WORK)
    story.words["time"] = rng.choice(("day", "hour", "week", "minute"))
    m, n = small(rng)
    story.tell("rate", m=m, n=n)
    story.product(m, n)
    if rng.random() < 0.4:
        n = rng.randint(2, 9)
        story.tell("rate_more", n=n)
        story.add(n)
    story.tell("ask_rate")


def _changes(start: str, add: str, take: str, ask: str, story: Story) -> None:
    """Something that grows and shrinks once or twice, in its own words."""
    rng = story.rng
    n = rng.randint(6, 30)
    story.tell(start, n=n)
    story.start(n)
    for _ in range(rng.choice((1, 2, 2))):
        n = rng.randint(2, 9)
        if story.total > n and (story.total > LIMIT - 9 or rng.random() < 0.6):
            story.tell(take, n=n)
            story.take(n)
        else:
            story.tell(add, n=n)
            story.add(n)
    story.tell(ask)


def _crowd(story: Story) -> None:
    story.words["people"] = story.words["items"] = story.rng.choice(PEOPLE)
    story.words["place"] = story.rng.choice(PLACES)
    _changes("crowd", "come", "go", "ask_crowd", story)


def _money(story: Story) -> None:
    story.words["items"] = "dollars"
    _changes("money", "earn", "spend", "ask_money", story)


def _gap(story: Story) -> None:
    """The difference of two numbers."""
    rng = story.rng
    n = rng.randint(5, LIMIT)
    k = rng.randint(2, n - 1)
    told, ask = rng.choice((("compare", "ask_difference"), ("goal", "ask_missing")))
    story.tell(told, n=n, k=k)
    story.start(n)
    story.take(k)
    story.tell(ask)


WIDE_SCENES = (*SCENES[2:], _short, _short, _short, _rate, _rate, _crowd, _crowd, _money, _money, _gap)


def _merge(rng: random.Random, told: list[str], name: str) -> list[str]:
    """Sentences about one person joined, or told of `he` or `she`."""
    pronoun = "She" if name in SHE else "He"
    out = told[:1]
    for sentence in told[1:]:
        bare = sentence.removeprefix("Then ").removeprefix("Later ")
        if bare.startswith(name + " ") and "?" not in sentence:
            rest, draw = bare[len(name) + 1 :], rng.random()
            if (
                draw < 0.25
                and out[-1].startswith((f"{name} ", f"{pronoun} "))
                and " and " not in out[-1]
                and "?" not in out[-1]
            ):
                out[-1] = out[-1][:-1] + rng.choice((" and ", " and then ", ", then ")) + rest
                continue
            if draw < 0.6:
                sentence = f"{pronoun} {rest}"
        elif sentence.endswith("?"):
            asked = sentence.replace(f"does {name} ", f"does {pronoun.lower()} ")
            sentence = asked if rng.random() < 0.5 else sentence
        out.append(sentence)
    return out


def _mine(told: list[str], name: str) -> list[str] | None:
    """The same told by the person; None where a sentence is too hard to turn."""
    out = []
    for sentence in told:
        text = re.sub(rf"\b{name}'s\b", "my", sentence)
        text = re.sub(rf"\bdoes {name}\b", "do I", text)
        text = re.sub(rf"\bdid {name}\b", "did I", text)
        text = re.sub(rf"\b{name} has\b", "I have", text)
        text = re.sub(rf"\b{name} is\b", "I am", text)
        text = re.sub(rf"\b{name} (?=\w+s\b)(\w+?)s\b", r"I \1", text)
        text = re.sub(
            rf"\b{name} (?=\w+ed\b|had|got|gave|found|lost|bought|sold|took|brought|used|picked)", "I ", text
        )
        text = re.sub(rf"(\w) {name}\b(?=[ .,?])", r"\1 me", text)
        if name in text or re.search(r"I \w+ .*\band \w+s\b|I \w*(ie|che|she|oe)\b", text):
            return None
        out.append(text[0].upper() + text[1:])
    return out


def problem(rng: random.Random, held_out: bool) -> Problem:
    """One word problem; in training, half of them from stories.toml."""
    if not held_out and rng.random() < 0.5:
        return stories.problem(rng)
    story = Story(rng, held_out)
    story.words["items"] = rng.choice(ITEMS + MORE_ITEMS)
    story.words["thing"] = rng.choice(THINGS + MORE_THINGS)
    rng.choice(WIDE_SCENES)(story)
    told, name = story.told, story.words["name"]
    draw = rng.random()
    if draw < 0.2 and story.words["other"] not in told[0]:
        told = _mine(told, name) or told
    elif draw < 0.7 and told[0].startswith(name):
        told = _merge(rng, told, name)
    if rng.random() < 0.2:
        story.told = []
        story.tell("aside", k=rng.randint(2, 30))
        told.insert(rng.randint(1, max(1, len(told) - 1)), story.told[0])
    if told[-1].startswith("How ") and rng.random() < 0.12:
        told = [told[-1], *told[:-1]]
    text = " ".join(told)
    if rng.random() < 0.15:
        text = re.sub(
            r"(?<![\d$])\d+\b", lambda m: WORDS[int(m[0])] if int(m[0]) < len(WORDS) else m[0], text
        )
        text = re.sub(r"(^|[.?] )([a-z])", lambda m: m[1] + m[2].upper(), text)
    return replace(story.problem(), text=text)
