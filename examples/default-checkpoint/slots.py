"""The values of a request's slots, drawn by name: rooms, times, people, things to say."""

from __future__ import annotations

import random
from collections.abc import Callable

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
