"""Rows of a task file: tokenized, and which of their tokens are learned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mars_export.calibration.tasks import tasks


@dataclass(frozen=True, slots=True)
class Row:
    """`kept`: it learns the base model's probabilities, and the base answers it if it has no answer."""

    path: Path
    task: tasks.TaskRow
    kept: bool

    @property
    def turns(self) -> list[dict[str, str]]:
        """The messages of a chat, if any, and the answer as one more."""
        given = [] if isinstance(self.task.source, str) else self.task.source
        answer = self.task.answer
        return given if answer is None else [*given, {"role": "assistant", "content": answer}]

    @property
    def is_answered(self) -> bool:
        return bool(self.turns) and self.turns[-1]["role"] == "assistant"

    def context(self, tokenizer: Any, count: int) -> str:
        """The text before a turn: the prompt, or the turns before it in the chat template."""
        if isinstance(self.task.source, str):
            return self.task.source
        begin = {"add_generation_prompt": not count or self.turns[count - 1]["role"] != "assistant"}
        tools = self.task.form.get("tools")
        return str(tokenizer.apply_chat_template(self.turns[:count], tokenize=False, tools=tools, **begin))

    def line(self) -> str:
        """The row as mars-export calibrate reads it: the last answer is the expected one."""
        *before, answer = self.turns
        source = {"prompt": self.task.source} if isinstance(self.task.source, str) else {"messages": before}
        score = "exact_match" if self.task.judge.name == "agreement" else self.task.judge.name
        values = {**source, "answer": answer["content"], "score": score, **self.task.form}
        values["max_new_tokens"] = self.task.max_new_tokens
        return json.dumps(values, ensure_ascii=False) + "\n"


@dataclass(frozen=True, slots=True)
class Sequence:
    """Tokens of a context, and from `start` on those of an answer."""

    tokens: list[int]
    start: int
    kept: bool = False


def read(path: Path | None, kept: bool = False) -> list[Row]:
    """The rows of a file, if one is given. Raises CalibrationError that lists bad lines."""
    return [Row(path, task, kept) for task in tasks.load(path)] if path else []


def encode(row: Row, base: Any, most: int) -> Iterator[Sequence]:
    """A sequence for each answer of a row. Context and answer are tokenized separately, as at inference. An
    answer of just `max_new_tokens` was cut: it has no end. Raises ValueError."""
    if not (row.is_answered or row.kept):
        raise ValueError(
            "no answer: give 'answer' or end with an assistant message (the base answers --keep)"
        )
    is_text, tokenizer = isinstance(row.task.source, str), base.tokenizer
    for index, message in enumerate(row.turns):
        if message["role"] != "assistant":
            continue
        try:
            context = row.context(tokenizer, index)
            whole = context + message["content"] if is_text else row.context(tokenizer, index + 1)
        except Exception as error:  # a template may raise anything
            raise ValueError(f"the chat template refuses its messages: {error}") from error
        if not whole.startswith(context):
            raise ValueError(f"the chat template changes the beginning of message {index}")
        tokens = tokenizer(context, add_special_tokens=is_text).input_ids
        ids = tokenizer(whole[len(context) :], add_special_tokens=False).input_ids
        stop = next((i for i, token in enumerate(ids) if token in base.ends), len(ids))
        end = [] if stop == row.task.max_new_tokens else [*ids, tokenizer.eos_token_id][stop : stop + 1]
        if (length := len(tokens) + stop + 1) > most:
            raise ValueError(f"{length} tokens, more than --max-length {most}")
        yield Sequence([*tokens, *ids[:stop], *end], len(tokens), row.kept)


def encode_all(rows: list[Row], base: Any, most: int) -> list[Sequence]:
    """The sequences of the rows. Exits with all that cannot be used."""
    encoded: list[Sequence] = []
    problems: list[str] = []
    for row in rows:
        try:
            encoded += encode(row, base, most)
        except ValueError as error:
            problems.append(f"{row.path}: row {row.task.number}: {error}")
    if problems:
        raise SystemExit("\n".join(problems))
    return encoded
