"""Reads a calibration text: rows or plain text as token sequences, with and without masks after them."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...runtime.bundle.manifest import TextInfo
from ...runtime.errors import ExportError, MarsError, listed
from ...runtime.text.tokenizer import Text
from ..checkpoint.open import Checkpoint

SUFFIXES = (".jsonl", ".txt")
SEQUENCES, LONGEST, MAX_TOKENS = 256, 512, 32_768  # limits; a longer sequence keeps its end
PARTS = 3  # sequences of a row: whole, and cut twice with masks after the cut
CHARACTERS = 8 * LONGEST  # at most, of a row or paragraph; a longer one keeps its end
SEED = 0
Prompt = str | list[Any]
GENERAL = Path(__file__).with_name("general.jsonl")  # a short text of many kinds, for typical activations


Row = tuple[int, Prompt, str | None]
"""The number of a line or paragraph in the file, from 1; a prompt; the answer if there is one."""


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Token sequences to calibrate with, and the sha256 of their file; None for the built-in text."""

    sequences: tuple[tuple[int, ...], ...]
    sha256: str | None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))


def built_in_text(checkpoint: Checkpoint, block: int) -> CalibrationText:
    """A short general text, for what needs typical activations only."""
    rows = _rows(GENERAL, GENERAL.read_text(encoding="utf-8"))
    return CalibrationText(_draw(Path("the built-in text"), rows, checkpoint, block), None)


def shortlist(checkpoint: Checkpoint, count: int, path: Path | None = None) -> tuple[int, ...]:
    """The `count` most frequent tokens, in ascending order: those that the tokenizer adds, which end turns
    and mark their parts, then those of the calibration text `path` or the built-in one, and then those with
    the lowest ids, which are the first merges of a byte-pair vocabulary. Empty if that is every token.
    """
    if count >= (size := checkpoint.dims.vocab_size):
        return ()
    text = read_text(path, checkpoint, 1) if path else built_in_text(checkpoint, 1)
    added = Tokenizer.from_str(checkpoint.vocabulary.tokenizer_json).get_added_tokens_decoder()
    seen = Counter(token for ids in text.sequences for token in ids)
    found = dict.fromkeys([*added, *(token for token, _ in seen.most_common()), *range(size)])
    return tuple(sorted([token for token in found if token < size][:count]))


def read_text(path: Path, checkpoint: Checkpoint, block: int) -> CalibrationText:
    """Draw sequences from a file, the same ones each time.

    `.jsonl`: rows as for `mars-export calibrate`, each with `messages` or `prompt`, and preferably `answer`;
    other fields are ignored. `.txt`: paragraphs, separated by blank lines. A MARS model predicts from masks,
    so two of three sequences are cut somewhere in the answer (or the text) and followed by the masks of a
    full window. Raises ExportError for a file that cannot be read, listing bad rows.
    """
    if path.suffix not in SUFFIXES:
        raise ExportError(f"{path}: --calibration-text takes a file named .jsonl (rows) or .txt (plain text)")
    try:
        data = path.read_bytes()
        content = data.decode("utf-8")
    except OSError as error:
        raise ExportError(f"{path}: the calibration text cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ExportError(
            f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8, or give another file to"
            " --calibration-text"
        ) from error
    rows = _rows(path, content) if path.suffix == ".jsonl" else _paragraphs(content)
    if not rows:
        raise ExportError(f"{path}: no text; give rows of your task (docs/quantization.md)")
    return CalibrationText(_draw(path, rows, checkpoint, block), hashlib.sha256(data).hexdigest())


def _rows(path: Path, content: str) -> list[Row]:
    rows, problems = [], []
    for number, line in enumerate(content.split("\n"), 1):
        try:
            if line.strip():
                rows.append((number, *_row(json.loads(line))))
        except (ValueError, RecursionError) as error:
            problems.append(f"line {number}: {error}")
    if problems:
        raise ExportError(f"{path}: rows that cannot be used:{listed(problems)}")
    return rows


def _row(value: Any) -> tuple[Prompt, str | None]:
    """Prompt and answer. Single messages are checked when they become tokens."""
    row = value if isinstance(value, dict) else {}
    prompt, answer = row.get("messages", row.get("prompt")), row.get("answer")
    if not prompt or not isinstance(prompt, str | list) or not isinstance(answer, str | None):
        raise ValueError(
            "an object with `messages` (a list) or `prompt` (a string), and `answer` (a string), is expected"
        )
    if isinstance(prompt, list) and answer is None and len(prompt) > 1:
        last = prompt[-1]
        if isinstance(last, dict) and last.get("role") == "assistant":  # as in chat data sets
            return prompt[:-1], str(last.get("content"))
    return prompt, answer


def _paragraphs(content: str) -> list[Row]:
    parts = enumerate(re.split(r"\n\s*\n", content), 1)
    return [(number, part.strip(), None) for number, part in parts if part.strip()]


def _draw(path: Path, rows: Sequence[Row], checkpoint: Checkpoint, block: int) -> tuple[tuple[int, ...], ...]:
    """Rows in a seeded order, each whole and cut, until the limits are reached."""
    vocabulary, dims = checkpoint.vocabulary, checkpoint.dims
    template, bos, eos = vocabulary.chat_template, vocabulary.bos_token, vocabulary.eos_token
    info = TextInfo("", template, bos, eos, special_tokens=vocabulary.special_tokens)
    text = Text(Tokenizer.from_str(vocabulary.tokenizer_json), info)
    longest = min(LONGEST, dims.context_length)
    mask = vocabulary.mask_token_id
    masks = [] if mask is None else [mask] * min(block - 1, longest // 2)
    draw = random.Random(SEED)
    sequences: list[tuple[int, ...]] = []
    problems: list[str] = []
    tokens = 0
    for number, prompt, answer in draw.sample(rows, len(rows)):
        try:
            asked = text.encode(prompt[-CHARACTERS:] if isinstance(prompt, str) else prompt)
            answered = [] if answer is None else text.encode_part(answer[:CHARACTERS])
        except MarsError as error:
            problems.append(f"row {number}: {error}")
            continue
        if answer is not None:
            answered = [*answered, vocabulary.eos_token_ids[0]]
        whole = [token for token in (*asked, *answered) if token < dims.vocab_size]
        first = len(whole) - len(answered) if answered else 1
        if not whole:
            continue
        cuts = [draw.randint(min(first, len(whole)), len(whole)) for _ in range(PARTS - 1)]
        for ids in (whole, *(whole[:cut] + masks for cut in cuts)):
            kept = tuple(ids[-longest:])
            if len(sequences) < SEQUENCES and tokens + len(kept) <= MAX_TOKENS:
                sequences.append(kept)
                tokens += len(kept)
    if problems:
        raise ExportError(f"{path}: rows that this checkpoint cannot read:{listed(problems)}")
    if not sequences:
        raise ExportError(f"{path}: no tokens in it; give rows of your task (docs/quantization.md)")
    return tuple(sequences)
