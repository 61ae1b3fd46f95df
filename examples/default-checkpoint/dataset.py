"""The mixture: examples by task, tokens and the split. Knows the chat format; knows nothing of the model."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import arithmetic
import assistant
import chat
from tokenizers import Tokenizer

EOS = 2
HELD_OUT = "held-out-4"  # seed of the held-out rows
DATA = Path(__file__).parent / "data"
# Calibration rows that the package ships as its built-in tasks.
BUILT_IN = Path(__file__).parents[2] / "calibration" / "tasks" / "data"
SHARES = {"assistant": 0.35, "arithmetic": 0.15, "chat": 0.50}  # of response tokens
METRICS = {"assistant": "exact_match", "arithmetic": "final_number", "chat": "agreement"}
# The text that GPTQ chooses the default checkpoint's int4 codes on: the first rows of each calibration split.
TEXT = Path(__file__).parents[2] / "exporter" / "default" / "calibration.jsonl"
TEXT_ROWS = {"assistant": 40, "arithmetic": 40, "chat": 20}
LIMITS = {"assistant": 128, "arithmetic": 112, "chat": 64}
ROWS = {
    "test": {"assistant": 500, "arithmetic": 500, "chat": 105},
    "calibration": {"assistant": 500, "arithmetic": 500, "chat": 105},
}


@dataclass(frozen=True, slots=True)
class Example:
    """Messages and the answer to learn."""

    messages: tuple[tuple[str, str], ...]  # (role, content)
    answer: str

    def prompt(self) -> str:
        """The chat format the adapter ships."""
        turns = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in self.messages)
        return turns + "<|im_start|>assistant\n"


def _answered(path: Path) -> dict[str, str]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["question"]: row["answer"] for row in rows if row["answer"]}


def draw(task: str, rng: random.Random, held_out: bool) -> Example:
    """One example of a generated task."""
    if task == "assistant":
        made = assistant.request(rng, held_out)
        return Example((("system", assistant.SYSTEM), ("user", made.text)), made.answer)
    problem = arithmetic.problem(rng, held_out)
    return Example((("user", problem.text),), problem.answer)


def examples(task: str, seed: str, held_out: bool) -> Iterator[Example]:
    """An endless, seeded stream of a task. The chat stream repeats its distilled answers, held-out ones
    once."""
    if task == "chat":
        side = "held-out" if held_out else "train"
        answers = _answered(DATA / f"distilled.{side}.jsonl")
        while True:
            for question in chat.questions(held_out):
                if question in answers:
                    yield Example((("user", question),), answers[question])
            if held_out:
                return
    index = 0
    while True:
        yield draw(task, random.Random(f"{seed}:{task}:{index}"), held_out)
        index += 1


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
    prompt = tokenizer.encode(example.prompt(), add_special_tokens=False).ids
    return [*prompt, *tokenizer.encode(example.answer, add_special_tokens=False).ids, EOS], len(prompt)


def mixture(
    tokenizer: Tokenizer, seed: str, shares: dict[str, float]
) -> Iterator[tuple[str, list[int], int]]:
    """Tasks, tokens and prompt lengths in the shares of response tokens asked for; never a held-out
    prompt."""
    streams = {task: examples(task, seed, held_out=False) for task in shares}
    closed = {task: {e.prompt() for rows in held_out_rows(task).values() for e in rows} for task in shares}
    spent = dict.fromkeys(shares, 1e-9)
    while True:
        task = min(shares, key=lambda name: spent[name] / shares[name])
        example = next(e for e in streams[task] if e.prompt() not in closed[task])
        tokens, prompt = encode(tokenizer, example)
        spent[task] += len(tokens) - prompt
        yield task, tokens, prompt


def write_held_out(folder: Path, built_in: Path) -> None:
    """Writes {task}.{split}.jsonl, the calibration rows of the generated tasks to `built_in`."""
    for task, metric in METRICS.items():
        for split, rows in held_out_rows(task).items():
            lines = [
                json.dumps(
                    {
                        "messages": [{"role": role, "content": content} for role, content in row.messages],
                        "answer": row.answer,
                        "metric": metric,
                        "max_new_tokens": LIMITS[task],
                    }
                )
                for row in rows
            ]
            place = built_in if split == "calibration" and task != "chat" else folder
            (place / f"{task}.{split}.jsonl").write_text("\n".join(lines) + "\n")


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
    write_held_out(DATA, BUILT_IN)
    write_text(TEXT)
