"""Rows of a JSONL file: checked, tokenized, and which of their tokens are learned."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, str]
ROLES = ("system", "user", "assistant")


class BadRows(Exception):
    """What is wrong with the rows, a line for each."""


@dataclass(frozen=True, slots=True)
class Row:
    """A chat, or a text to continue (`prompt`); answers are messages of the assistant. `kept`: it learns the
    base model's probabilities, and the base answers it if it has no answer. `raw` are the fields of the line.
    """

    where: str
    prompt: str | None
    messages: list[Message]
    kept: bool
    raw: dict[str, Any]

    @property
    def is_answered(self) -> bool:
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def task(self) -> dict[str, Any]:
        """The row as mars-export calibrate reads it: the last answer is the expected one."""
        fields = {name: self.raw[name] for name in ("score", "max_new_tokens") if name in self.raw}
        source = {"messages": self.messages[:-1]} if self.prompt is None else {"prompt": self.prompt}
        return {**source, "answer": self.messages[-1]["content"], "score": "exact_match"} | fields


@dataclass(frozen=True, slots=True)
class Sequence:
    """Tokens of a context, and from `start` on those of an answer."""

    tokens: list[int]
    start: int
    kept: bool = False


def read(path: Path, kept: bool, problems: list[str]) -> list[Row]:
    """The rows of a file; what is wrong with it is appended to `problems`, a line for each row."""
    rows: list[Row] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path}: cannot be read: {error}")
        return rows
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}: line {number}"
            try:
                rows.append(_row(where, json.loads(line), kept))
            except (ValueError, RecursionError) as error:
                problems.append(f"{where}: {error}")
    if not rows and not problems:
        problems.append(f'{path}: no rows; a row is {{"messages": [...], "answer": "..."}} on one line')
    return rows


def _row(where: str, value: Any, kept: bool) -> Row:
    if not isinstance(value, dict):
        raise ValueError("a row must be a JSON object")
    json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is not text
    prompt, messages, answer = value.get("prompt"), value.get("messages", []), value.get("answer")
    if ("prompt" in value) == ("messages" in value):
        raise ValueError("give either 'messages' or 'prompt'")
    if "prompt" in value and not (isinstance(prompt, str) and prompt):
        raise ValueError("'prompt' must be a non-empty string")
    if not isinstance(messages, list):
        raise ValueError("'messages' must be a list")
    for index, m in enumerate(messages):
        if not isinstance(m, dict) or m.get("role") not in ROLES or not isinstance(m.get("content"), str):
            raise ValueError(f"message {index} must have a string 'content' and a 'role': {', '.join(ROLES)}")
    if not isinstance(value.get("finished", True), bool):
        raise ValueError("'finished' must be true, or false if the answer goes on")
    if answer is not None:
        if not isinstance(answer, str) or not answer:
            raise ValueError("'answer' must be a non-empty string")
        if messages and messages[-1]["role"] == "assistant":
            raise ValueError("the last message is an answer, too; leave 'answer' out")
        messages = [*messages, {"role": "assistant", "content": answer}]
    row = Row(where, prompt, messages, kept, value)
    if not row.is_answered and not (kept and (prompt or messages)):
        raise ValueError(
            "no answer: give 'answer' or end with an assistant message (the base answers --keep)"
        )
    return row


def encode(row: Row, tokenizer: Any, ends: Collection[int], most: int) -> Iterator[Sequence]:
    """A sequence for each answer of a row, in the context that it has at inference; context and answer are
    tokenized separately, as there. Raises BadRows."""
    for index, message in enumerate(row.messages):
        if message["role"] != "assistant":
            continue
        context, answer = row.prompt, message["content"]
        if context is None:
            try:
                context, whole = (
                    ask(row.messages[:index], tokenizer),
                    ask(row.messages[: index + 1], tokenizer),
                )
            except Exception as error:  # a template may raise anything
                raise BadRows(f"{row.where}: the chat template refuses its messages: {error}") from error
            if not whole.startswith(context):
                raise BadRows(f"{row.where}: the chat template changes the beginning of message {index}")
            answer = whole[len(context) :]
        tokens = tokenizer(context, add_special_tokens=row.prompt is not None).input_ids
        ids = tokenizer(answer, add_special_tokens=False).input_ids
        stop = next((i for i, token in enumerate(ids) if token in ends), len(ids))
        end = [*ids, tokenizer.eos_token_id][stop : stop + 1] if row.raw.get("finished", True) else []
        if (length := len(tokens) + stop + 1) > most:
            raise BadRows(f"{row.where}: {length} tokens, more than --max-length {most}")
        yield Sequence([*tokens, *ids[:stop], *end], len(tokens), row.kept)


def ask(messages: list[Message], tokenizer: Any) -> str:
    """Messages in the chat template, with the beginning of an answer if there is none."""
    begin = not messages or messages[-1]["role"] != "assistant"
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=begin))


def encode_all(rows: list[Row], tokenizer: Any, ends: Collection[int], most: int) -> list[Sequence]:
    """The sequences of the rows. Raises BadRows with all that cannot be used."""
    if tokenizer.chat_template is None and any(row.prompt is None for row in rows):
        raise BadRows("the base has no chat template for 'messages'; give rows with 'prompt' and 'answer'")
    encoded, problems = [], []
    for row in rows:
        try:
            encoded += encode(row, tokenizer, ends, most)
        except BadRows as error:
            problems.append(str(error))
    if problems:
        raise BadRows("\n".join(problems))
    return encoded
