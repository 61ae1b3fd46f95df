"""What the stock model is asked: the training questions of the default checkpoint's chat rows, longer forms
of them, second turns, texts to rewrite, and requests with tool calls; or the held-out chat rows."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

CHECKPOINT = Path(__file__).parents[1] / "default-checkpoint"
sys.path.insert(0, str(CHECKPOINT))

import assistant  # noqa: E402
import chat  # noqa: E402
from dataset import DATA, Messages  # noqa: E402

LONG = (
    "Write a short story about {x}.",
    "Write a paragraph about {x}.",
    "Explain {x} in detail.",
    "Give me five facts about {x}.",
    "Write a blog post about {x}.",
    "What are the pros and cons of {x}?",
)
SECOND = ("Tell me more.", "Why?", "Give me an example.", "Make it longer.", "Can you list the main points?")
REWRITES = (
    "Summarize this in one sentence: {x}",
    "Rewrite this in other words: {x}",
    "Make this text more formal: {x}",
    "List the key points of this text: {x}",
)
SHARES = {"question": 0.55, "long": 0.2, "second": 0.1, "rewrite": 0.1, "tools": 0.05}


def held_out() -> list[Messages]:
    """The prompts of chat.test.jsonl."""
    rows = map(json.loads, (DATA / "chat.test.jsonl").read_text().splitlines())
    return [[[turn["role"], turn["content"]] for turn in row["messages"]] for row in rows]


def talks(count: int) -> list[Messages]:
    """The first `count` of a seeded list of talks."""
    rng = random.Random("gated")
    questions = chat.questions(False)
    rows = [json.loads(line) for line in (DATA / "distilled.train.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["finished"] and len(row["messages"]) == 1 and len(row["answer"]) > 80]
    concepts = chat.FAMILIES["concepts"]["topics"]
    topics = [topic for index, topic in enumerate(concepts) if index % 6 != 5]
    made: dict[str, Messages] = {}
    while len(made) < count:
        (kind,) = rng.choices([*SHARES], [*SHARES.values()])
        row = rng.choice(rows)
        if kind == "question":
            talk = [["user", rng.choice(questions)]]
        elif kind == "long":
            talk = [["user", rng.choice(LONG).format(x=rng.choice(topics))]]
        elif kind == "second":
            talk = [*row["messages"], ["assistant", row["answer"]], ["user", rng.choice(SECOND)]]
        elif kind == "rewrite":
            talk = [["user", rng.choice(REWRITES).format(x=row["answer"])]]
        else:
            request = assistant.request(random.Random(rng.random()), False)
            talk = [["system", assistant.SYSTEM], ["user", request.text]]
        made[json.dumps(talk)] = talk
    return [*made.values()]
