"""The assistant task: free-worded requests to a home and phone assistant, answered by a JSON list of calls.

Knows slot values and how a request is put together; intents.toml has the intents and their wordings. Each
intent reserves some wordings: held-out rows use only those, training rows never do.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

SYSTEM = "Reply with tool calls."

Value = str | int
Slot = Callable[[random.Random], tuple[str, Value]]  # the words of the request, the value of the argument


def choice(*words: str) -> Slot:
    """A slot whose value is copied from the request."""

    def draw(rng: random.Random) -> tuple[str, Value]:
        word = rng.choice(words)
        return word, word

    return draw


def number(low: int, high: int, step: int = 1) -> Slot:
    """A slot whose digits in the request become an integer."""

    def draw(rng: random.Random) -> tuple[str, Value]:
        value = rng.randrange(low, high + 1, step)
        return str(value), value

    return draw


def composed(*parts: tuple[str, ...]) -> Slot:
    """Free text put together from one phrase of each part, copied verbatim."""

    def draw(rng: random.Random) -> tuple[str, Value]:
        text = " ".join(filter(None, (rng.choice(part) for part in parts)))
        return text, text

    return draw


def clock(rng: random.Random) -> tuple[str, Value]:
    """A time of day, copied verbatim."""
    hour, half = rng.randrange(1, 13), rng.choice(("am", "pm"))
    text = (
        f"{hour} {half}"
        if rng.random() < 0.5
        else f"{hour}:{rng.choice(('15', '30', '45', '10', '20', '05'))} {half}"
    )
    return text, text


ROOMS = (
    "kitchen",
    "bedroom",
    "living room",
    "bathroom",
    "office",
    "hallway",
    "garage",
    "basement",
    "attic",
    "dining room",
    "nursery",
    "guest room",
)
PEOPLE = (
    "mom",
    "dad",
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Hugo",
    "Ivy",
    "Jack",
    "Kim",
    "Leo",
    "Maria",
    "Nina",
    "Oscar",
    "Paul",
    "Rosa",
    "Sam",
    "Tina",
    "Victor",
    "Wendy",
    "Zoe",
    "my boss",
    "the dentist",
    "grandma",
    "Uncle Bob",
)
CITIES = (
    "Paris",
    "Rome",
    "Tokyo",
    "London",
    "Berlin",
    "Madrid",
    "Sydney",
    "Chicago",
    "Boston",
    "Oslo",
    "Vienna",
    "Lisbon",
    "Dublin",
    "Seattle",
    "Toronto",
    "Mumbai",
    "Cairo",
    "Lima",
    "Athens",
    "Denver",
)
DAYS = ("today", "tomorrow", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
ITEMS = (
    "milk",
    "eggs",
    "bread",
    "butter",
    "rice",
    "apples",
    "bananas",
    "coffee",
    "tea",
    "sugar",
    "flour",
    "pasta",
    "cheese",
    "tomatoes",
    "onions",
    "potatoes",
    "soap",
    "batteries",
    "paper towels",
    "orange juice",
    "dog food",
    "olive oil",
    "light bulbs",
    "toothpaste",
    "yogurt",
    "carrots",
)
ARTISTS = (
    "Queen",
    "Adele",
    "Mozart",
    "the Beatles",
    "Miles Davis",
    "Taylor Swift",
    "Bach",
    "Drake",
    "Coldplay",
    "Nina Simone",
    "Pink Floyd",
    "Bob Marley",
    "Abba",
    "Shakira",
    "Daft Punk",
    "Elton John",
    "some jazz",
    "classical music",
    "rock",
    "piano music",
    "blues",
    "hip hop",
)
PLACES = (
    "the airport",
    "the office",
    "home",
    "the nearest gas station",
    "Central Park",
    "the train station",
    "the library",
    "12 Oak Street",
    "45 Main Street",
    "the hospital",
    "the grocery store",
    "the museum",
    "8 River Road",
    "City Hall",
    "the gym",
    "Sunset Beach",
    "the stadium",
)
DEVICES = ("phone", "tablet", "keys", "wallet", "watch", "laptop", "headphones", "remote")
APPS = (
    "camera",
    "calendar",
    "maps",
    "photos",
    "settings",
    "browser",
    "calculator",
    "mail",
    "music",
    "contacts",
)
LANGUAGES = (
    "French",
    "Spanish",
    "German",
    "Italian",
    "Japanese",
    "Dutch",
    "Greek",
    "Polish",
    "Korean",
    "Swedish",
)

SLOTS: dict[str, Slot] = {
    "room": choice(*ROOMS),
    "percent": number(5, 100, 5),
    "color": choice("red", "blue", "green", "yellow", "purple", "orange", "pink", "white", "warm white"),
    "degrees": number(15, 28),
    "minutes": number(2, 59),
    "seconds": number(10, 90, 5),
    "hours": number(2, 12),
    "label": choice(
        "pasta",
        "laundry",
        "eggs",
        "pizza",
        "tea",
        "cookies",
        "workout",
        "nap",
        "bread",
        "rice",
        "chicken",
        "homework",
    ),
    "time": clock,
    "day": choice(*DAYS),
    "artist": choice(*ARTISTS),
    "level": number(1, 100),
    "person": choice(*PEOPLE),
    "message": composed(
        (
            "I am",
            "we are",
            "the kids are",
            "dinner is",
            "the car is",
            "the meeting is",
            "the package is",
            "I will be",
            "the train is",
        ),
        ("almost", "still", "not", "already", "nearly", "finally", "probably"),
        (
            "ready",
            "at home",
            "late",
            "on the way",
            "outside",
            "here",
            "in the garden",
            "at the station",
            "done",
            "downstairs",
            "cold",
        ),
    ),
    "place": choice(*PLACES),
    "mode": choice("car", "bike", "bus", "train", "foot"),
    "note": composed(
        (
            "the spare key is",
            "the wifi password is",
            "the blue folder is",
            "the old camera is",
            "my parking spot is",
            "the gift is",
            "the charger is",
        ),
        (
            "under the desk",
            "in the top drawer",
            "behind the door",
            "on level 3",
            "next to the sofa",
            "in the red box",
            "at the front desk",
            "sunflower 42",
            "in my backpack",
            "near the stairs",
        ),
    ),
    "chore": composed(
        (
            "water",
            "buy",
            "check",
            "clean",
            "return",
            "pick up",
            "order",
            "fix",
            "pack",
            "move",
            "wash",
            "send",
        ),
        (
            "the plants",
            "the tickets",
            "the car",
            "the books",
            "the medicine",
            "the cake",
            "the laundry",
            "the printer",
            "the flowers",
            "the suitcase",
            "the invoice",
            "the dog bowl",
            "the curtains",
        ),
    ),
    "item": choice(*ITEMS),
    "count": number(2, 12),
    "door": choice(
        "front door", "back door", "garage door", "side door", "gate", "balcony door", "cellar door"
    ),
    "city": choice(*CITIES),
    "title": composed(
        (
            "team",
            "budget",
            "dentist",
            "yoga",
            "piano",
            "project",
            "school",
            "birthday",
            "design",
            "book club",
            "doctor",
            "sales",
        ),
        ("meeting", "appointment", "lesson", "review", "call", "lunch", "session", "party"),
    ),
    "query": composed(
        ("cheap", "the best", "new", "vegetarian", "easy", "local", "used", "simple"),
        (
            "bike shops",
            "pancake recipes",
            "hiking trails",
            "phone cases",
            "hotels",
            "guitar lessons",
            "running shoes",
            "desk lamps",
            "card games",
            "cafes",
        ),
    ),
    "phrase": composed(
        ("good", "where is the", "thank you for the", "I like the", "how much is the", "I need a"),
        ("morning", "ticket", "soup", "station", "evening", "dinner", "map", "doctor", "hotel", "coffee"),
    ),
    "language": choice(*LANGUAGES),
    "device": choice(*DEVICES),
    "app": choice(*APPS),
    "fan": choice("low", "medium", "high"),
}


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
FRAMES = {
    "free": (
        "I'd like you to {}",
        "I want you to {}",
        "I need you to {}",
        "it would be great if you could {}",
        "it would be nice if you would {}",
        "do me a favor and {}",
        "be so kind and {}",
        "can we {}",
        "let's {}",
        "go ahead and {}",
        "{}, will you",
        "{}, would you",
        "{} if you can",
        "is it possible to {}",
        "any chance you could {}",
        "I think we should {}",
        "I was going to ask you to {}",
        "can I ask you to {}",
        "would it be possible to {}",
        "you could {}",
        "don't forget to {}",
        "quick, {}",
        "when you have a moment, {}",
        "{} as soon as you can",
        "what I need is this: {}",
        "may I ask you to {}",
        "just {}",
        "first of all, {}",
    ),
    "reserved": (
        "I was wondering if you could {}",
        "would you be able to {}",
        "if you don't mind, {}",
        "it's time to {}",
    ),
}
FRAMED = 0.3  # of the requests that begin with an order
OPENINGS = (  # of an order
    "",
    "",
    "",
    "please ",
    "can you ",
    "could you ",
    "hey, ",
    "ok, ",
    "would you ",
    "hi, please ",
    "now ",
    "could you please ",
)
GREETINGS = (
    "",
    "",
    "",
    "",
    "",
    "hey, ",
    "ok, ",
    "hi, ",
    "so, ",
    "well, ",
    "listen, ",
    "please, ",
)  # of a remark
ENDINGS = ("", "", "", "", " please", ", thanks", ".", " now", " for me", ", thank you")
JOINS = (" and ", " and then ", ", then ", ", and ", "; also ", " and also ")
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
    """A request and the JSON that answers it."""

    text: str
    answer: str


def _clause(rng: random.Random, held_out: bool) -> tuple[str, dict[str, object]]:
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
    return text, {"name": intent.name, "arguments": arguments}


def request(rng: random.Random, held_out: bool) -> Request:
    """One request of one to three clauses."""
    clauses = [_clause(rng, held_out) for _ in range(rng.choice(COUNTS if held_out else TRAIN_COUNTS))]
    text = clauses[0][0]
    for index, (clause, _) in enumerate(clauses[1:], start=2):
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
    return Request(text, json.dumps([call for _, call in clauses]))
