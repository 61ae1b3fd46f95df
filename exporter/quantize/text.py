"""Reads a calibration text: rows or plain text as token sequences, with and without masks after them."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...runtime.errors import ExportError, MarsError, listed
from ...runtime.text.tokenizer import Text
from ..checkpoint.open import Checkpoint

SUFFIXES = (".jsonl", ".txt")
SEQUENCES, LONGEST, MAX_TOKENS = 256, 512, 32_768  # limits; a longer sequence keeps its end
PARTS = 3  # sequences of a row: whole, and cut twice with masks after the cut
CHARACTERS = 8 * LONGEST  # at most, of a row or paragraph; a longer one keeps its end
SEED = 0
Prompt = str | list[Any]
GENERAL = (
    "The market opens at six in the morning. Farmers from the valley bring apples, cheese and"
    " eggs, and by nine o'clock most of the bread has been sold. In the afternoon the square is"
    " empty again, except for the pigeons.",
    "def mean(values: list[float]) -> float:\n    total = 0.0\n    for value in values:\n       "
    " total += value\n    return total / len(values) if values else 0.0\n\nprint(mean([3.5, 4.25,"
    " 10]))\n",
    '{"id": 4821, "name": "Maria Keller", "email": "maria@example.org", "tags": ["admin", "beta"],'
    ' "active": true, "score": 17.25, "address": {"city": "Bern", "zip": "3011"}}',
    "Question: A box holds 24 pencils. How many pencils are in 7 boxes, if 5 pencils are"
    " missing?\nAnswer: 7 boxes hold 7 * 24 = 168 pencils. 168 - 5 = 163. There are 163 pencils.",
    "User: My order has not arrived yet. Can you help me?\nAssistant: I am sorry to hear that."
    " Please give me the order number, and I will find out where the parcel is.\nUser: It is 77-1093.",
    "Photosynthesis converts light into chemical energy. Plants absorb carbon dioxide and water,"
    " and release oxygen; the sugar that they build is stored as starch. The rate depends on"
    " temperature, light and the supply of water.",
    "# Installation\n\n1. Download the archive (version 2.4.1 or later).\n2. Run `make install` as"
    " root.\n3. Edit /etc/server.conf and set `port = 8080`.\n\n- Linux, macOS: supported\n- Windows:"
    " see [notes](notes.md)\n",
    "Translate into French: Good evening, where is the station? Bonsoir, où est la gare ?"
    " Translate into German: The train is late. Der Zug hat Verspätung. Translate into Spanish:"
    " Thank you. Gracias.",
    "In the north of the country the winters are long, and people heat their houses with wood"
    " from the forests around them. Every family has a stove in the middle of the largest"
    " room, where the children do their homework and the dog sleeps. When the snow melts in"
    " April, the roads turn to mud, and for two weeks nobody travels farther than the next"
    " village. Then the birch trees become green within a few days, and everybody who can is"
    " outside until midnight.",
    "The committee published its report on 14 March 2019. It found that the bridge had been"
    " inspected in 2011 and 2015, that both inspections had noted corrosion at three of the"
    " twelve supports, and that no repairs were made because the budget of the district"
    " (about 2.3 million euros a year) had been spent on other roads. The minister said that"
    " the government would accept all 21 recommendations, but the opposition asked why it had"
    " taken four years.",
    "What is the difference between weather and climate? Weather is the state of the"
    " atmosphere at one place and time: today it rains, tomorrow the sun may shine. Climate"
    " is the average of the weather over many years, usually thirty. A cold week in May says"
    " nothing about the climate, but if most weeks in May have become warmer over several"
    " decades, the climate has changed.",
    "He opened the letter with a knife, read it twice, and put it back into the envelope."
    ' "Bad news?" she asked. "I don\'t know yet," he said. "My brother wants to come home."'
    " She looked out of the window, where the neighbor's boys were playing in the rain."
    ' "After all these years," she said. "Where would he sleep?"',
    "import json\nfrom pathlib import Path\n\n\nclass Store:\n    def __init__(self, path: Path)"
    " -> None:\n        self.path = path\n        self.items = json.loads(path.read_text()) if"
    " path.exists() else {}\n\n    def put(self, key: str, value: object) -> None:\n       "
    " self.items[key] = value\n        self.path.write_text(json.dumps(self.items, indent=2))\n",
    "SELECT customer.name, COUNT(*) AS orders, SUM(total) AS revenue FROM orders JOIN"
    " customer ON customer.id = orders.customer_id WHERE orders.created >= '2024-01-01' GROUP"
    " BY customer.name HAVING SUM(total) > 1000 ORDER BY revenue DESC LIMIT 20;",
    "Here are three tips for a better presentation: 1. Know what you want your listeners to"
    " remember, and say it at the beginning and at the end. 2. Use few slides with few words;"
    " people cannot read and listen at the same time. 3. Practice aloud, with a clock. If"
    " something goes wrong, stay calm: most people in the room want you to succeed.",
    "The heart of an adult beats about 70 times a minute at rest and pumps five liters of"
    " blood through the body in that time. The right side sends blood to the lungs, where it"
    " takes up oxygen, and the left side sends it to all other organs. Valves between the"
    " chambers keep it from flowing back. During exercise the heart can pump more than twenty"
    " liters a minute.",
)


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
    rows: list[Row] = [(number, text, None) for number, text in enumerate(GENERAL, 1)]
    return CalibrationText(_draw(Path("the built-in text"), rows, checkpoint, block), None)


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
