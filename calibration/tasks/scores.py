"""The named scores of answers, from 0 to 1."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...runtime.errors import CalibrationError

_FINAL = re.compile(r"####\s*(-?[\d,]*\.?\d+)")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_MAX_DIGITS = 300  # float() of a longer number would be infinite


@dataclass(frozen=True, slots=True)
class Output:
    """An answer as text and as tokens."""

    text: str
    token_ids: tuple[int, ...] = ()


Judge = Callable[[Output, Output], float]
"""(output, expected) -> 0 (wrong) to 1 (right). `expected` is the row's answer, or the one-token output."""


@dataclass(frozen=True, slots=True)
class Score:
    """A named score. `needs`: what the output is compared with."""

    name: str
    needs: Literal["answer", "reference", "nothing"]
    judge: Judge


def exact_match(output: Output, expected: Output) -> float:
    """The same text, except for surrounding white space."""
    return float(output.text.strip() == expected.text.strip())


def normalized_match(output: Output, expected: Output) -> float:
    """The same words: case, punctuation and white space do not matter."""
    return float(_words(output.text) == _words(expected.text))


def final_number(output: Output, expected: Output) -> float:
    """The same number after the last `####`, or else the same last number."""
    number = _last_number(expected.text)
    return float(number is not None and _last_number(output.text) == number)


def json_equal(output: Output, expected: Output) -> float:
    """The same JSON value; the order of an object's keys does not matter."""
    try:
        return float(_canonical(json.loads(output.text)) == _canonical(json.loads(expected.text)))
    except (ValueError, RecursionError):
        return 0.0


def json_valid(output: Output, _: Output) -> float:
    """Any JSON value, and nothing else."""
    try:
        json.loads(output.text)
    except (ValueError, RecursionError):
        return 0.0
    return 1.0


def regex(output: Output, expected: Output) -> float:
    """The answer is a regular expression that is found somewhere in the output."""
    return float(re.search(expected.text, output.text) is not None)


def contains(output: Output, expected: Output) -> float:
    """The answer is part of the output."""
    return float(expected.text in output.text)


def agreement(output: Output, expected: Output) -> float:
    """The same text as the model's own one-token output."""
    return float(output.text == expected.text)


def edit_similarity(output: Output, expected: Output) -> float:
    """1 - edit distance / length of the longer, in tokens, to the model's own one-token output."""
    longest = max(len(output.token_ids), len(expected.token_ids))
    return 1 - _edit_distance(output.token_ids, expected.token_ids) / longest if longest else 1.0


_ANSWER = (exact_match, normalized_match, final_number, json_equal, regex, contains)
SCORES: dict[str, Score] = {
    score.name: score
    for score in (
        *(Score(judge.__name__, "answer", judge) for judge in _ANSWER),
        Score("json_valid", "nothing", json_valid),
        *(Score(judge.__name__, "reference", judge) for judge in (agreement, edit_similarity)),
    )
}


def own(name: str) -> Score:
    """A user's score, `module:function`, which is called with two texts, output and answer, and returns 0 to
    1.

    The module may be in the working directory. Raises CalibrationError if it cannot be imported.
    """
    module, _, function = name.partition(":")
    if not module or not function.isidentifier():
        raise CalibrationError(
            f"unknown score {name!r} (known: {', '.join(SCORES)}, or your own as module:function)",
            field="score",
        )
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        call = getattr(importlib.import_module(module), function)
    except Exception as error:  # a module of the user's can fail in any way
        what = f"score {name}: {type(error).__name__}: {error}"
        raise CalibrationError(what, field="score") from error
    finally:
        sys.path.remove(here)
    if not callable(call):
        raise CalibrationError(f"score {name}: {function} is not a function", field="score")

    def judge(output: Output, expected: Output) -> float:
        try:
            value = call(output.text, expected.text)
        except Exception as error:  # and so can a function of the user's
            raise CalibrationError(
                f"score {name} raised {type(error).__name__}: {error}; called with {_short(output.text)} and"
                f" {_short(expected.text)}"
            ) from error
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise CalibrationError(f"score {name} gave {value!r}; a number from 0 to 1 is expected")
        return float(value)

    return Score(name, "answer", judge)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _words(text: str) -> list[str]:
    characters = (
        " " if unicodedata.category(c)[0] in "PSZC" else c
        for c in unicodedata.normalize("NFKC", text).casefold()
    )
    return "".join(characters).split()


def _last_number(text: str) -> float | None:
    numbers = _FINAL.findall(text) or _NUMBER.findall(text)
    if not numbers or len(numbers[-1]) > _MAX_DIGITS:
        return None
    return float(numbers[-1].replace(",", ""))


def _canonical(value: Any) -> str:
    """Text that is equal for equal JSON values: true is not 1, 1.0 is 1, keys have no order."""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return json.dumps(int(value))
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{_canonical(v)}" for k, v in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_canonical, value)) + "]"
    return json.dumps(value)


def _edit_distance(one: Sequence[int], other: Sequence[int]) -> int:
    """Fewest insertions, deletions and replacements that make `other` of `one`."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, start=1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(other, start=1):
            diagonal, row[j] = row[j], min(diagonal + (a != b), row[j] + 1, row[j - 1] + 1)
    return row[-1]
