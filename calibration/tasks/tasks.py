"""The form that a task row requires of its answer, as fields of a GenerationConfig: a schema, a regex,
choices or tools."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...runtime.decode.config import GenerationConfig
from ...runtime.errors import CalibrationError, MarsError, listed
from ...runtime.rules import is_integer
from . import scores
from .scores import SCORES, Output, Score

FORM_FIELDS = ("schema", "regex", "choice", "tools")


def read_form(row: Mapping[str, Any]) -> dict[str, Any]:
    """The form in a row's fields. Raises CalibrationError for invalid values."""
    values = {name: row[name] for name in FORM_FIELDS if row.get(name) is not None}
    if isinstance(values.get("choice"), list):
        values["choice"] = tuple(values["choice"])
    try:
        config = GenerationConfig(**values)
    except MarsError as error:
        raise CalibrationError(str(error)) from error
    return {name: getattr(config, name) for name in values}


def read_schema(path: Path) -> dict[str, Any]:
    """The schema in a file of JSON. Raises CalibrationError for anything else."""
    try:
        return read_form({"schema": json.loads(path.read_text(encoding="utf-8"))})
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be read: {error.strerror}; give a JSON schema") from error
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{path}: not a JSON schema: {error}") from error
    except CalibrationError as error:
        raise CalibrationError(f"{path}: {error}") from error


ROLES = ("system", "user", "assistant")
FIELDS = ("messages", "prompt", "answer", "score", "max_new_tokens", *FORM_FIELDS)
DATA = Path(__file__).parent / "data"
SUFFIX = ".calibration.jsonl"

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One row: a prompt, how its output is judged, and the longest output."""

    source: str | Messages  # a text to be continued, or messages for the chat template
    judge: Score
    answer: str | None  # None if the score does not need one
    max_new_tokens: int
    number: int = 0  # of the row in its file, from 1
    prompt_ids: tuple[int, ...] | None = None  # the tokenized prompt
    form: Mapping[str, Any] = field(default_factory=dict)  # of every output: fields of a GenerationConfig

    @property
    def prompt(self) -> str | Messages | tuple[int, ...]:
        """The prompt for the runtime: tokenized if that was done."""
        return self.source if self.prompt_ids is None else self.prompt_ids

    def config(self, base: GenerationConfig) -> GenerationConfig:
        """`base` with the row's limit and form."""
        return base.with_values(max_new_tokens=self.max_new_tokens, **self.form)

    @property
    def shown(self) -> str:
        """The text to continue, or the last message."""
        return self.source if isinstance(self.source, str) else self.source[-1]["content"]

    def score(self, output: Output, reference: Output | None = None) -> float:
        """The score of an output, 0 to 1. `reference` is the one-token output, for scores that need it."""
        answer = None if self.answer is None else Output(self.answer)
        expected = {"reference": reference, "answer": answer, "nothing": Output("")}[self.judge.needs]
        if expected is None:
            raise CalibrationError(
                f"score {self.judge.name} has nothing to compare with: run tau 1 first, or give an answer"
            )
        try:
            return self.judge.judge(output, expected)
        except CalibrationError as error:
            raise CalibrationError(f"row {self.number}: {error}") from error

    @property
    def digest(self) -> str:
        """A hash of the row's prompt, score, answer, limit and form."""
        text, messages = (self.source, []) if isinstance(self.source, str) else (None, self.source)
        values: list[Any] = [messages, text, self.judge.name, self.answer, self.max_new_tokens]
        if self.form:  # so that rows without one keep their earlier digest
            values.append(dict(self.form))
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def builtin_names() -> list[str]:
    """Names of the built-in tasks."""
    return sorted(path.name.removesuffix(SUFFIX) for path in DATA.glob(f"*{SUFFIX}"))


def find(task: str) -> Path:
    """The file of a built-in task, or the path itself."""
    return DATA / f"{task}{SUFFIX}" if task in builtin_names() else Path(task)


def data_hash(tasks: Sequence[TaskRow]) -> str:
    """One SHA-256 over all rows, in their order."""
    return hashlib.sha256("".join(task.digest for task in tasks).encode()).hexdigest()


def load(path: str | Path, *, score: str | None = None) -> list[TaskRow]:
    """Read a JSONL file of tasks. Raises CalibrationError that lists every bad line.

    `score` is that of rows that name none, a built-in one or `module:function`; no other module is imported.
    """
    path = Path(path)
    default = SCORES.get(score or "agreement") or scores.own(str(score))
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON strings may hold U+2028
    except OSError as error:
        names = "".join(f" or {name}" for name in builtin_names())
        raise CalibrationError(
            f"{path}: cannot be read: {error.strerror}; give a JSONL file{names}"
        ) from error
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    tasks: list[TaskRow] = []
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            tasks.append(_task(json.loads(line), len(tasks) + 1, default))
        except json.JSONDecodeError as error:
            problems.append(f"line {number}: not JSON: {error.msg} at column {error.colno}")
        except CalibrationError as error:
            problems.append(f"line {number}: {error}")
        except RecursionError:
            problems.append(f"line {number}: nested too deeply")
        except ValueError:
            problems.append(f"line {number}: it has a number with too many digits")
    if problems:
        raise CalibrationError(f"{path}:{listed(problems)}")
    if not tasks:
        raise CalibrationError(
            f"{path}: no rows; write one JSON object a line, with messages or prompt, answer, score and"
            " max_new_tokens"
        )
    return tasks


def _task(row: Any, number: int, default: Score) -> TaskRow:
    if not isinstance(row, dict):
        raise CalibrationError("a row must be a JSON object")
    problems = [f"unknown field {name!r} (known: {', '.join(FIELDS)})" for name in row if name not in FIELDS]
    answer, limit = row.get("answer"), row.get("max_new_tokens", 256)
    score = _score(row, default, problems)
    if answer is not None and not isinstance(answer, str):
        problems.append("'answer' must be a string")
    elif score.needs == "answer" and answer is None:
        problems.append(f"missing field 'answer', which score {score.name} needs")
    elif score.name == "regex" and answer is not None:
        _check_pattern(answer, problems)
    if not is_integer(limit, 1):
        problems.append(f"'max_new_tokens' must be a positive integer, not {limit!r}")
    source = _source(row, problems)
    shape: dict[str, Any] = {}
    try:
        shape = read_form(row)
    except CalibrationError as error:
        problems.append(str(error))
    texts = [source] if isinstance(source, str) else [message["content"] for message in source]
    if re.search("[\ud800-\udfff]", "".join([*texts, answer if isinstance(answer, str) else ""])):
        problems.append("a lone surrogate is not text")
    if problems:
        raise CalibrationError("; ".join(problems))
    return TaskRow(source, score, answer, limit, number, form=shape)


def _score(row: dict[str, Any], default: Score, problems: list[str]) -> Score:
    name = row.get("score", default.name)
    score = default if name == default.name else SCORES.get(name) if isinstance(name, str) else None
    if score is None:
        is_own = isinstance(name, str) and ":" in name
        hint = "; your own module:function must be named with --score" if is_own else ""
        problems.append(f"unknown score {name!r} (known: {', '.join(SCORES)}){hint}")
    return score or default


def _check_pattern(pattern: str, problems: list[str]) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        problems.append(f"'answer' is not a regular expression: {error}")


def _source(row: dict[str, Any], problems: list[str]) -> str | Messages:
    """The text or the messages of a row."""
    if "messages" in row and "prompt" in row:
        problems.append("'messages' and 'prompt' exclude each other; give one")
    elif "messages" in row:
        return _messages(row["messages"], problems)
    elif "prompt" not in row:
        problems.append("missing field 'messages' (or 'prompt')")
    elif not isinstance(row["prompt"], str) or not row["prompt"]:
        problems.append("'prompt' must be a non-empty string")
    else:
        return row["prompt"]
    return ""


def _messages(value: Any, problems: list[str]) -> Messages:
    if not isinstance(value, list) or not value:
        problems.append("'messages' must be a non-empty list")
        return []
    turns: Messages = []
    for index, message in enumerate(value):
        if (
            not isinstance(message, dict)
            or set(message) != {"role", "content"}
            or not all(isinstance(v, str) for v in message.values())
        ):
            problems.append(f"message {index} must have exactly the strings 'role' and 'content'")
        elif message["role"] not in ROLES:
            problems.append(f"message {index} has role {message['role']!r} (known: {', '.join(ROLES)})")
        else:
            turns.append({"role": message["role"], "content": message["content"]})
    return turns
