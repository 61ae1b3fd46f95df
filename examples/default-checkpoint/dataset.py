"""The training mixture: examples by task in the chat format, their tokens, and the split."""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import arithmetic
import assistant
import smalltalk
import wide
from tokenizers import Tokenizer

from mars_export.exporter.checkpoint import default

EOS = 2
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # the base template's own
HELD_OUT = "held-out-4"  # seed of the held-out rows
DATA = Path(__file__).parent / "data"
# Calibration rows that the package ships as its built-in tasks.
BUILT_IN = Path(__file__).parents[2] / "calibration" / "tasks" / "data"
SHARES = {"assistant": 0.20, "arithmetic": 0.30, "chat": 0.38, "smalltalk": 0.12}  # of response tokens
NUM_WIDE = 100
WIDE = 0.7  # of the word problems in training
DISTILLED = ("chat", "smalltalk")  # tasks that use the base model's answers
METRICS = {"assistant": "exact_match", "arithmetic": "final_number", "chat": "agreement"}
# The text that GPTQ chooses the default checkpoint's int4 codes on: the first rows of each calibration split.
TEXT = Path(__file__).parents[2] / "exporter" / "default" / "calibration.jsonl"
TEXT_ROWS = {"assistant": 40, "arithmetic": 40, "chat": 20}
LIMITS = {"assistant": 128, "arithmetic": 112, "chat": 64}
ROWS = {
    "test": {"assistant": 500, "arithmetic": 500, "chat": 105},
    "calibration": {"assistant": 500, "arithmetic": 500, "chat": 105},
}


Messages = Sequence[Sequence[str]]  # (role, content)


def prompt(messages: Messages) -> str:
    """The base model's chat format: without a system message there is its own."""
    if messages[0][0] != "system":
        messages = [("system", SYSTEM), *messages]
    return turns(messages) + "<|im_start|>assistant\n"


def turns(messages: Messages) -> str:
    """Messages as they stand in a prompt."""
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)


@dataclass(frozen=True, slots=True)
class Example:
    """Messages and the answer to learn, which may be the beginning of a longer one."""

    messages: Messages
    answer: str
    finished: bool = True

    def prompt(self) -> str:
        return prompt(self.messages)


def _distilled(held_out: bool) -> list[Example]:
    lines = (DATA / f"distilled.{'held-out' if held_out else 'train'}.jsonl").read_text().splitlines()
    examples = [Example(**json.loads(line)) for line in lines]
    random.Random(9).shuffle(examples)
    return examples


def smalltalk_talk(rng: random.Random, answered: list[Example]) -> Example:
    """A turn of small talk: the first, or one that follows others."""
    before: list[tuple[str, str]] = []
    intents: tuple[str, ...] = ()
    kind = rng.random()
    if kind < 0.2:  # after an answer
        row = rng.choice(answered)
        before = [*row.messages, ("assistant", row.answer)]
        intents = (
            "thanks",
            "thanks",
            "bye",
            "ok",
            "no",
            "compliment",
            "complaint",
            "laugh",
            "repeat",
            "confused",
        )
    elif kind < 0.4:  # after a greeting
        said, reply = smalltalk.drawn(rng, "greeting", "named", "how")
        before = [("user", said), ("assistant", reply)]
        intents = ("how", "name", "human", "can", "thanks", "bye", "named", "happy", "sad", "bored", "joke")
    said, reply = smalltalk.drawn(rng, *intents)
    return Example((*before, ("user", said)), reply)


def chat_talk(rng: random.Random, row: Example, answered: list[Example]) -> Example:
    """A distilled row, sometimes after a greeting or another question and its answer."""
    kind = rng.random()
    if kind < 0.15:
        said, reply = smalltalk.drawn(rng, "greeting", "how", "named")
        return replace(row, messages=(("user", said), ("assistant", reply), *row.messages))
    if kind < 0.3:
        first = rng.choice(answered)
        return replace(row, messages=(*first.messages, ("assistant", first.answer), *row.messages))
    return row


def draw(task: str, rng: random.Random, held_out: bool) -> Example:
    """One example of a generated task."""
    if task == "assistant":
        made = assistant.request(rng, held_out)
        return Example((("system", assistant.SYSTEM), ("user", made.text)), made.answer)
    free_worded = not held_out and rng.random() < WIDE
    problem = (wide if free_worded else arithmetic).problem(rng, held_out)
    return Example((("user", problem.text),), problem.answer)


def examples(task: str, seed: str, held_out: bool) -> Iterator[Example]:
    """An endless, seeded stream of a task. The chat stream repeats its distilled answers, held-out ones
    once."""
    distilled = _distilled(held_out) if task in DISTILLED else []
    if task == "chat" and held_out:
        yield from distilled
        return
    answered = [row for row in distilled if row.answer.endswith((".", "!", "?"))]
    for index in itertools.count():
        rng = random.Random(f"{seed}:{task}:{index}")
        if task == "chat":
            yield chat_talk(rng, distilled[index % len(distilled)], answered)
        elif task == "smalltalk":
            yield smalltalk_talk(rng, answered)
        else:
            yield draw(task, rng, held_out)


def held_out_rows(task: str) -> dict[str, list[Example]]:
    """The test and calibration rows of a task, no prompt twice."""
    splits: dict[str, list[Example]] = {}
    seen: set[str] = set()
    stream = examples(task, HELD_OUT, held_out=True)
    for split, counts in ROWS.items():
        rows: list[Example] = []
        for example in stream:
            if example.prompt() not in seen:
                seen.add(example.prompt())
                rows.append(example)
            if len(rows) == counts[task]:
                break
        splits[split] = rows
    return splits


def encode(tokenizer: Tokenizer, example: Example) -> tuple[list[int], int]:
    """Token ids of prompt + answer + end, and the prompt's length. Both parts are tokenized alone, as at
    inference."""
    start = tokenizer.encode(example.prompt(), add_special_tokens=False).ids
    answer = tokenizer.encode(example.answer, add_special_tokens=False).ids
    return [*start, *answer, *[EOS] * example.finished], len(start)


def mixture(tokenizer: Tokenizer, seed: str, shares: dict[str, float]) -> Iterator[tuple[str, Example]]:
    """Tasks and examples in the shares of response tokens asked for; never a held-out prompt."""
    streams = {task: examples(task, seed, held_out=False) for task in shares}
    closed = {
        task: {e.prompt() for rows in held_out_rows(task).values() for e in rows}
        if task in METRICS
        else set()
        for task in shares
    }
    spent = dict.fromkeys(shares, 1e-9)
    while True:
        task = min(shares, key=lambda name: spent[name] / shares[name])
        example = next(e for e in streams[task] if e.prompt() not in closed[task])
        tokens, prompt = encode(tokenizer, example)
        spent[task] += len(tokens) - prompt
        yield task, example


def write_training(folder: Path, count: int, seed: str) -> None:
    """Writes the first rows of the mixture for examples/finetune: those of chat, whose answers are the base
    model's, to keep.jsonl, and the others to rows.jsonl."""
    tokenizer = Tokenizer.from_file(str(default.base_directory() / "tokenizer.json"))
    lines: dict[str, list[str]] = {"rows.jsonl": [], "keep.jsonl": []}
    for task, example in itertools.islice(mixture(tokenizer, seed, SHARES), count):
        messages = [{"role": role, "content": content} for role, content in example.messages]
        row: dict[str, object] = {"messages": messages, "answer": example.answer}
        if not example.finished:  # an answer of just max_new_tokens has no end to learn
            tokens, prompt = encode(tokenizer, example)
            row["max_new_tokens"] = len(tokens) - prompt
        lines["keep.jsonl" if task == "chat" else "rows.jsonl"].append(json.dumps(row) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in lines.items():
        (folder / name).write_text("".join(rows))


def _line(task: str, row: Example) -> str:
    messages = [{"role": role, "content": content} for role, content in row.messages]
    fields = {
        "messages": messages, "answer": row.answer, "score": METRICS[task], "max_new_tokens": LIMITS[task],
    }  # fmt: skip
    return json.dumps(fields) + "\n"


def write_held_out(folder: Path, built_in: Path) -> None:
    """Writes {task}.{split}.jsonl, the calibration rows of the generated tasks to `built_in`."""
    for task in METRICS:
        for split, rows in held_out_rows(task).items():
            place = built_in if split == "calibration" and task != "chat" else folder
            (place / f"{task}.{split}.jsonl").write_text("".join(_line(task, row) for row in rows))
    write_wide(folder / "wide.test.jsonl")


def write_wide(path: Path) -> None:
    """Writes word problems as people put them, of held-out wordings only."""
    made = [wide.problem(random.Random(f"{HELD_OUT}:wide:{i}"), True) for i in range(NUM_WIDE)]
    rows = [Example((("user", problem.text),), problem.answer) for problem in made]
    path.write_text("".join(_line("arithmetic", row) for row in rows))


def write_text(path: Path) -> None:
    """Writes messages and answers of `TEXT_ROWS` calibration rows, shuffled."""
    rows = [row for task, count in TEXT_ROWS.items() for row in held_out_rows(task)["calibration"][:count]]
    random.Random(7).shuffle(rows)
    lines = [
        json.dumps(
            {
                "messages": [{"role": role, "content": text} for role, text in row.messages],
                "answer": row.answer,
            }
        )
        for row in rows
    ]
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=Path, help="write training rows to this directory, nothing else")
    parser.add_argument("--count", type=int, default=5800, help="of training rows (default %(default)s)")
    parser.add_argument("--seed", default="train-3")
    args = parser.parse_args()
    if args.train:
        write_training(args.train, args.count, args.seed)
    else:
        write_held_out(DATA, BUILT_IN)
        write_text(TEXT)
