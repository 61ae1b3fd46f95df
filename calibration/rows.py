"""The request of a command over task rows, and the rows to decode with their tokenized prompts."""

from __future__ import annotations

import platform
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..runtime.decode.config import GenerationConfig
from ..runtime.errors import CalibrationError, MarsError, listed
from ..runtime.machine import cores
from ..runtime.session.session import Session
from .options import TaskOptions
from .tasks.tasks import DATA, SUFFIX, TaskRow, find, load, read_schema

SCHEMA = ".schema.json"  # of a built-in task's answers
SEED = 20260407  # of the order of rows


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows to decode in their order, with their prompts as token ids."""

    tasks: tuple[TaskRow, ...]
    too_long: tuple[int, ...] = ()  # row numbers, from 1, whose prompt does not fit the context

    @property
    def prompt_range(self) -> tuple[int, int]:
        lengths = [len(task.prompt_ids or ()) for task in self.tasks]
        return min(lengths), max(lengths)

    @property
    def judges(self) -> str:
        """The names of the scores."""
        return ", ".join(sorted({task.judge.name for task in self.tasks}))


def make_plan(session: Session, tasks: Sequence[TaskRow], limit: int | None = None) -> Plan:
    """The rows to decode, at most `limit`, in a seeded order. Raises CalibrationError that lists bad rows."""
    if session.text is None:
        raise CalibrationError(
            f"{session.bundle.path}: this bundle has no tokenizer, but tasks are text: export a checkpoint"
            " with a tokenizer"
        )
    order = list(range(len(tasks)))
    random.Random(SEED).shuffle(order)
    rows: list[TaskRow] = []
    too_long: list[int] = []
    refusals: list[str] = []
    capacity = session.backend.max_capacity
    for i in order[:limit]:
        form = tasks[i].form
        try:
            if form:
                session.grammar_state(tasks[i].config(GenerationConfig()))
            ids = tuple(session.text.encode(tasks[i].source, tools=form.get("tools")))
        except MarsError as error:
            if error.code == "context_length_exceeded":
                too_long.append(i + 1)
            else:
                refusals.append(f"row {i + 1}: {error}")
            continue
        if not ids:
            refusals.append(f"row {i + 1}: the prompt is empty")
        elif len(ids) > capacity:
            too_long.append(i + 1)
        else:
            rows.append(replace(tasks[i], prompt_ids=ids))
    if refusals:
        raise CalibrationError(f"rows that cannot be decoded:{listed(refusals)}")
    if not rows:
        raise CalibrationError(
            f"every prompt is longer than the context of {capacity} tokens, so there is nothing to decode"
        )
    return Plan(tuple(rows), tuple(sorted(too_long)))


@dataclass(frozen=True, slots=True)
class TaskRequest(TaskOptions):
    """The inputs of a command over task rows. `task`: a built-in task's name or a file."""

    bundle: Path
    task: str
    variant: str | None = None
    cache_bytes: int = 0  # of the prefix cache

    @property
    def file(self) -> Path:
        return find(self.task)

    @property
    def task_name(self) -> str:
        """The built-in task's name, or the file's name."""
        return self.file.name.removesuffix(SUFFIX) if self.file.parent == DATA else self.file.name

    @property
    def stem(self) -> str:
        """The task's name without the suffix of its file."""
        return self.file.name.removesuffix(SUFFIX).removesuffix(".jsonl")

    @property
    def machine(self) -> str:
        """The machine of the figures, in words."""
        count = self.threads
        threads = "default threads" if not count else f"{count} thread{'s' if count > 1 else ''}"
        return f"{platform.machine()}, {cores()} logical cores, {self.device}, {threads}"

    def rows(self, path: Path | None = None) -> list[TaskRow]:
        """The task's rows, or those of another file with the same options."""
        tasks = load(path or self.file, score=self.score)
        if self.schema is None:
            return tasks
        built_in = DATA / f"{self.schema}{SCHEMA}"
        form = read_schema(built_in if built_in.is_file() else Path(self.schema))
        return [task if task.form else replace(task, form=form) for task in tasks]

    def open(self) -> Session:
        settings: dict[str, Any] = {
            "threads": self.threads,
            "variant": self.variant,
            "accuracy_level": self.accuracy_level,
        }
        return Session.open(self.bundle, self.device, cache_bytes=self.cache_bytes, **settings)
