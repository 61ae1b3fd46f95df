"""Reads a calibration text: rows or plain text as token sequences, with and without masks after them."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...runtime.errors import ExportError, MarsError, listed
from ...runtime.text.tokenizer import Text
from ..checkpoint.open import Checkpoint

SUFFIXES = (".jsonl", ".txt")
LARGEST_FILE = 64_000_000  # bytes
SEQUENCES, LONGEST, MOST_TOKENS = 256, 512, 32_768  # limits; a longer sequence keeps its end
PARTS = 3  # sequences of a row: whole, and cut twice with masks after the cut
CHARACTERS = 8 * LONGEST  # at most, of a row or paragraph; a longer one keeps its end
SEED = 0
Prompt = str | list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class CalibrationRow:
    """A prompt, and the answer if there is one. `number` is its line or paragraph in the file, from 1."""

    number: int
    prompt: Prompt
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Token sequences to calibrate with, and the sha256 of the file they come from."""

    sequences: tuple[tuple[int, ...], ...]
    sha256: str

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))


def read_text(path: Path, checkpoint: Checkpoint, block: int) -> CalibrationText:
    """Draw sequences from a file, the same ones each time.

    `.jsonl`: rows as for `mars-export calibrate`, each with `messages` or `prompt`, and preferably `answer`;
    other fields are ignored. `.txt`: paragraphs, separated by blank lines. A MARS model predicts from masks,
    so two of three sequences are cut somewhere in the answer (or the text) and followed by the masks of a
    full window. Raises ExportError for a file that cannot be read, listing bad rows.
    """
    data = _bytes(path)
    try:
        content = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ExportError(
            f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8, or give another file to"
            " --calibration-text"
        ) from error
    rows = _rows(path, content) if path.suffix == ".jsonl" else list(_paragraphs(content))
    if not rows:
        raise ExportError(f"{path}: no text; give rows of your task (docs/quantization.md)")
    return CalibrationText(_draw(path, rows, checkpoint, block), hashlib.sha256(data).hexdigest())


def _bytes(path: Path) -> bytes:
    if path.suffix not in SUFFIXES:
        raise ExportError(f"{path}: --calibration-text takes a file named .jsonl (rows) or .txt (plain text)")
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ExportError(f"{path}: the calibration text cannot be read ({error.strerror})") from error
    if len(data) > LARGEST_FILE:
        raise ExportError(f"{path}: more than {LARGEST_FILE // 10**6} MB; a few hundred rows are enough")
    return data


def _rows(path: Path, content: str) -> list[CalibrationRow]:
    rows, problems = [], []
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(_row(number, json.loads(line)))
        except (ValueError, RecursionError) as error:
            problems.append(f"line {number}: {error}")
    if problems:
        raise ExportError(f"{path}: rows that cannot be used:{listed(problems)}")
    return rows


def _row(number: int, value: Any) -> CalibrationRow:
    if not isinstance(value, dict):
        raise ValueError("a JSON object is expected")
    answer, messages, prompt = (value.get(name) for name in ("answer", "messages", "prompt"))
    if answer is not None and not isinstance(answer, str):
        raise ValueError("`answer` must be a string")
    if messages is None:
        if not isinstance(prompt, str) or not prompt:
            raise ValueError("`messages`, or a non-empty string `prompt`, is needed")
        return CalibrationRow(number, prompt, answer)
    plain = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages
    )
    if not plain or not messages:
        raise ValueError("`messages` must be a list of objects with the strings `role` and `content`")
    turns = [{"role": m["role"], "content": m["content"]} for m in messages]
    if answer is None and len(turns) > 1 and turns[-1]["role"] == "assistant":
        answer = turns.pop()["content"]  # as in chat data sets
    return CalibrationRow(number, turns, answer)


def _paragraphs(content: str) -> Iterator[CalibrationRow]:
    for number, part in enumerate(re.split(r"\n\s*\n", content), 1):
        if part.strip():
            yield CalibrationRow(number, part.strip())


def _draw(
    path: Path, rows: Sequence[CalibrationRow], checkpoint: Checkpoint, block: int
) -> tuple[tuple[int, ...], ...]:
    """Rows in a seeded order, each whole and cut, until the limits are reached."""
    vocabulary, dims = checkpoint.vocabulary, checkpoint.dims
    text = Text(
        Tokenizer.from_str(vocabulary.tokenizer_json),
        vocabulary.chat_template,
        vocabulary.bos_token,
        vocabulary.eos_token,
    )
    longest = min(LONGEST, dims.context_length)
    mask = vocabulary.mask_token_id
    masks = [] if mask is None else [mask] * min(block - 1, longest // 2)
    draw = random.Random(SEED)
    order = draw.sample(range(len(rows)), len(rows))
    sequences: list[tuple[int, ...]] = []
    problems: list[str] = []
    tokens = 0
    for i in order:
        try:
            prompt, answer = _encoded(rows[i], text, vocabulary.eos_token_ids[0])
        except MarsError as error:
            problems.append(f"row {rows[i].number}: {error}")
            continue
        whole = [token for token in (*prompt, *answer) if token < dims.vocab_size]
        first = len(whole) - len(answer) if answer else 1
        if not whole:
            continue
        cuts = [draw.randint(min(first, len(whole)), len(whole)) for _ in range(PARTS - 1)]
        for ids in (whole, *(whole[:cut] + masks for cut in cuts)):
            kept = tuple(ids[-longest:])
            if len(sequences) < SEQUENCES and tokens + len(kept) <= MOST_TOKENS:
                sequences.append(kept)
                tokens += len(kept)
    if problems:
        raise ExportError(f"{path}: rows that this checkpoint cannot read:{listed(problems)}")
    if not sequences:
        raise ExportError(f"{path}: no tokens in it; give rows of your task (docs/quantization.md)")
    return tuple(sequences)


def _encoded(row: CalibrationRow, text: Text, eos: int) -> tuple[list[int], list[int]]:
    """Prompt and answer as token ids; very long ones are cut to the part where they meet."""
    prompt = row.prompt[-CHARACTERS:] if isinstance(row.prompt, str) else row.prompt
    ids = text.encode(prompt)
    if row.answer is None:
        return ids, []
    return ids, [*text.encode_part(row.answer[:CHARACTERS]), eos]
