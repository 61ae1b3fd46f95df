"""Task rows, JSONL files of them, and the metrics that judge an answer. Knows no model and no tau."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mars_export.runtime.errors import CalibrationError

Metric = Callable[[str, str], bool]
"""(output, answer) -> whether the output is right."""

ROLES = ("system", "user", "assistant")
_FINAL = re.compile(r"####\s*(-?[\d,]*\.?\d+)")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def exact_match(output: str, answer: str) -> bool:
    """The same text, but for white space around it."""
    return output.strip() == answer.strip()


def final_number(output: str, answer: str) -> bool:
    """The same number after the last `####`, or else the same last number."""
    wanted = _last_number(answer)
    return wanted is not None and _last_number(output) == wanted


def json_equal(output: str, answer: str) -> bool:
    """The same JSON value; the order of an object's keys does not matter."""
    try:
        return bool(json.loads(output) == json.loads(answer))
    except ValueError:
        return False


def agreement(output: str, answer: str) -> bool:
    """The same text as the reference, which is the model's own one-token output."""
    return output == answer


METRICS: dict[str, Metric] = {"exact_match": exact_match, "final_number": final_number, "json_equal": json_equal, "agreement": agreement}


def _last_number(text: str) -> float | None:
    found = _FINAL.findall(text) or _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of the prompt."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Task:
    """One row: a prompt, how its output is judged, and the longest output. `answer` may be None for agreement only."""

    messages: tuple[Message, ...]
    metric: str
    answer: str | None
    max_new_tokens: int

    @property
    def prompt(self) -> list[dict[str, str]]:
        """The messages as the runtime takes them."""
        return [{"role": m.role, "content": m.content} for m in self.messages]

    @property
    def needs_reference(self) -> bool:
        """Whether the output is compared with the model's own one-token output, not with `answer`."""
        return self.metric == "agreement"

    def is_right(self, output: str, reference: str | None = None) -> bool:
        """Judge an output; `reference` is the one-token output, for agreement."""
        expected = reference if self.needs_reference else self.answer
        if expected is None:
            raise CalibrationError(f"metric {self.metric} has nothing to compare with: run tau 1 first, or give the row an answer")
        return METRICS[self.metric](output, expected)


def load(path: str | Path) -> list[Task]:
    """Read a JSONL file of tasks. Raises CalibrationError that lists every bad line."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    tasks: list[Task] = []
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            tasks.append(_task(json.loads(line)))
        except json.JSONDecodeError as error:
            problems.append(f"line {number}: not JSON: {error.msg} at column {error.colno}")
        except CalibrationError as error:
            problems.append(f"line {number}: {error}")
    if problems:
        raise CalibrationError(f"{path}:\n  " + "\n  ".join(problems))
    if not tasks:
        raise CalibrationError(f"{path}: no rows; write one JSON object a line, with messages, answer, metric and max_new_tokens")
    return tasks


def _task(row: Any) -> Task:
    if not isinstance(row, dict):
        raise CalibrationError("a row must be a JSON object")
    known = ("messages", "answer", "metric", "max_new_tokens")
    problems = [f"unknown field {name!r} (known: {', '.join(known)})" for name in row if name not in known]
    metric, answer, limit = row.get("metric", "agreement"), row.get("answer"), row.get("max_new_tokens", 256)
    if metric not in METRICS:
        problems.append(f"unknown metric {metric!r} (known: {', '.join(METRICS)})")
    elif metric != "agreement" and answer is None:
        problems.append(f"missing field 'answer', which metric {metric} needs")
    if answer is not None and not isinstance(answer, str):
        problems.append("'answer' must be a string")
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        problems.append(f"'max_new_tokens' must be a positive integer, not {limit!r}")
    messages: tuple[Message, ...] = ()
    if "messages" not in row:
        problems.append("missing field 'messages'")
    else:
        messages = _messages(row["messages"], problems)
    if problems:
        raise CalibrationError("; ".join(problems))
    return Task(messages, metric, answer, limit)


def _messages(value: Any, problems: list[str]) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        problems.append("'messages' must be a non-empty list")
        return ()
    made: list[Message] = []
    for index, message in enumerate(value):
        if not isinstance(message, dict) or set(message) != {"role", "content"} or not all(isinstance(v, str) for v in message.values()):
            problems.append(f"message {index} must have exactly the strings 'role' and 'content'")
        elif message["role"] not in ROLES:
            problems.append(f"message {index} has role {message['role']!r} (known: {', '.join(ROLES)})")
        else:
            made.append(Message(message["role"], message["content"]))
    return tuple(made)
