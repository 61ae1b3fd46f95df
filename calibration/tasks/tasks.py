"""Task rows and the JSONL files that hold them, the built-in ones included. Knows no model and no tau."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...runtime.errors import CalibrationError
from . import execution
from . import scores as metrics
from .scores import METRICS, Metric, Output

ROLES = ("system", "user", "assistant")
FIELDS = ("messages", "prompt", "answer", "metric", "max_new_tokens")
DATA = Path(__file__).parent / "data"
SUFFIX = ".calibration.jsonl"
NOTHING = Output("")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of the prompt."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Task:
    """One row: a prompt, how its output is judged, and the longest output.

    `messages` go through the chat template; where there are none, `text` is continued as it stands. `answer` may be None
    where the metric does not need one. `metric` is a name in METRICS, or `scorer` is a user's own.
    """

    messages: tuple[Message, ...]
    metric: str
    answer: str | None
    max_new_tokens: int
    text: str | None = None
    scorer: Metric | None = None

    @property
    def prompt(self) -> str | list[dict[str, str]]:
        """The prompt as the runtime takes it."""
        return (
            self.text
            if self.text is not None
            else [{"role": m.role, "content": m.content} for m in self.messages]
        )

    @property
    def judge(self) -> Metric:
        return self.scorer or METRICS[self.metric]

    @property
    def needs_reference(self) -> bool:
        """Whether the output is compared with the model's own one-token output, not with `answer`."""
        return self.judge.needs == "reference"

    def score(self, output: Output, reference: Output | None = None) -> float:
        """How good an output is, 0 to 1; `reference` is the one-token output, for the metrics that need it."""
        needs = self.judge.needs
        answer = None if self.answer is None else Output(self.answer)
        expected = {"reference": reference, "answer": answer, "nothing": NOTHING}[needs]
        if expected is None:
            raise CalibrationError(
                f"metric {self.metric} has nothing to compare with: run tau 1 first, or give the row an answer"
            )
        return self.judge.score(output, expected)

    @property
    def digest(self) -> str:
        """Changes with anything that changes the row's prompt, judgement or limit."""
        values = [asdict(m) for m in self.messages], self.text, self.metric, self.answer, self.max_new_tokens
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def builtin_names() -> list[str]:
    """Names of the tasks that come with the package."""
    return sorted(path.name.removesuffix(SUFFIX) for path in DATA.glob(f"*{SUFFIX}"))


def find(task: str) -> Path:
    """The file of a built-in task, or the path as it stands."""
    return DATA / f"{task}{SUFFIX}" if task in builtin_names() else Path(task)


def data_hash(tasks: Sequence[Task]) -> str:
    """One SHA-256 over all rows, in their order."""
    return hashlib.sha256("".join(task.digest for task in tasks).encode()).hexdigest()


def load(path: str | Path, *, score: str | None = None, allow_exec: bool = False) -> list[Task]:
    """Read a JSONL file of tasks. Raises CalibrationError that lists every bad line.

    `score` names the metric of rows that have none, a built-in one or `module:function`; only what is named here is ever
    imported. `allow_exec` allows metrics that run what the model wrote.
    """
    path = Path(path)
    default = _default_metric(score)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON strings may hold U+2028
    except OSError as error:
        names = "".join(f" or {name}" for name in builtin_names())
        raise CalibrationError(
            f"{path}: cannot be read: {error.strerror}; give a JSONL file{names}"
        ) from error
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    tasks: list[Task] = []
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            tasks.append(_task(json.loads(line), default, allow_exec))
        except json.JSONDecodeError as error:
            problems.append(f"line {number}: not JSON: {error.msg} at column {error.colno}")
        except (CalibrationError, RecursionError, ValueError) as error:
            problems.append(f"line {number}: {error}")
    if problems:
        more = [f"and {len(problems) - 20} more lines"] if len(problems) > 20 else []
        raise CalibrationError(f"{path}:\n  " + "\n  ".join(problems[:20] + more))
    if not tasks:
        raise CalibrationError(
            f"{path}: no rows; write one JSON object a line, with messages or prompt, answer, metric and max_new_tokens"
        )
    return tasks


def _default_metric(score: str | None) -> Metric:
    if score is None:
        return METRICS["agreement"]
    return METRICS[score] if score in METRICS else metrics.own(score)


def _task(row: Any, default: Metric, allow_exec: bool) -> Task:
    if not isinstance(row, dict):
        raise CalibrationError("a row must be a JSON object")
    problems = [f"unknown field {name!r} (known: {', '.join(FIELDS)})" for name in row if name not in FIELDS]
    answer, limit = row.get("answer"), row.get("max_new_tokens", 256)
    metric = _metric(row, default, allow_exec, problems)
    if answer is not None and not isinstance(answer, str):
        problems.append("'answer' must be a string")
    elif metric.needs == "answer" and answer is None:
        problems.append(f"missing field 'answer', which metric {metric.name} needs")
    elif metric.name == "regex" and answer is not None:
        _check_pattern(answer, problems)
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        problems.append(f"'max_new_tokens' must be a positive integer, not {limit!r}")
    text, messages = _prompt(row, problems)
    if re.search(
        "[\ud800-\udfff]",
        "".join([text or "", answer if isinstance(answer, str) else "", *(m.content for m in messages)]),
    ):
        problems.append("half a surrogate pair is not text")
    if problems:
        raise CalibrationError("; ".join(problems))
    return Task(messages, metric.name, answer, limit, text, metric if metric.name not in METRICS else None)


def _metric(row: dict[str, Any], default: Metric, allow_exec: bool, problems: list[str]) -> Metric:
    name = row.get("metric", default.name)
    metric = METRICS.get(name) if isinstance(name, str) else None
    if name == default.name:
        metric = default
    if metric is None:
        hint = (
            "; your own module:function must be named with --score"
            if isinstance(name, str) and ":" in name
            else ""
        )
        problems.append(f"unknown metric {name!r} (known: {', '.join(METRICS)}){hint}")
        return default
    if metric.runs_code and not allow_exec:
        problems.append(
            f"metric {metric.name} runs what the model writes, on this machine and not in a sandbox: allow it with --allow-exec"
        )
    elif metric.runs_code and not execution.is_supported():
        problems.append(f"metric {metric.name} needs a system that can limit a process; this one cannot")
    return metric


def _check_pattern(pattern: str, problems: list[str]) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        problems.append(f"'answer' is no regular expression: {error}")


def _prompt(row: dict[str, Any], problems: list[str]) -> tuple[str | None, tuple[Message, ...]]:
    """(text, messages) of a row: one of them."""
    if "messages" in row and "prompt" in row:
        problems.append("'messages' and 'prompt' are both there; give one")
    elif "messages" in row:
        return None, _messages(row["messages"], problems)
    elif "prompt" not in row:
        problems.append("missing field 'messages' (or 'prompt')")
    elif not isinstance(row["prompt"], str) or not row["prompt"]:
        problems.append("'prompt' must be a non-empty string")
    else:
        return row["prompt"], ()
    return None, ()


def _messages(value: Any, problems: list[str]) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        problems.append("'messages' must be a non-empty list")
        return ()
    made: list[Message] = []
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
            made.append(Message(message["role"], message["content"]))
    return tuple(made)
