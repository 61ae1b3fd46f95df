"""What every command over task rows is asked for: a bundle on a device, the rows, and a folder for what comes of them. Decodes nothing."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from ..runtime import Session
from .tasks.tasks import DATA, SUFFIX, Task, find, load

STATE_FILE = "state.jsonl"


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """`task` is a built-in task's name or a file; `score` the metric of rows that name none. `resume` goes on with what an
    earlier run left in the output folder, `force` throws it away."""

    bundle: Path
    task: str
    output: Path | None = None
    score: str | None = None
    allow_exec: bool = False
    device: str = "cpu"
    threads: int | None = None
    variant: str | None = None
    accuracy_level: int | None = None
    resume: bool = False
    force: bool = False

    @property
    def file(self) -> Path:
        return find(self.task)

    @property
    def task_name(self) -> str:
        """The built-in task's name, or the file's without its folder."""
        return self.file.name.removesuffix(SUFFIX) if self.file.parent == DATA else self.file.name

    @property
    def stem(self) -> str:
        """The task's name without what says that it is a file of rows."""
        return self.file.name.removesuffix(SUFFIX).removesuffix(".jsonl")

    @property
    def machine(self) -> str:
        """Where the figures come from, in words."""
        threads = (
            f"{self.threads} thread{'s' if self.threads > 1 else ''}" if self.threads else "default threads"
        )
        return f"{platform.machine()}, {os.cpu_count()} logical cores, {self.device}, {threads}"

    def rows(self) -> list[Task]:
        return load(self.file, score=self.score, allow_exec=self.allow_exec)

    def open(self) -> Session:
        return Session.open(
            self.bundle,
            self.device,
            threads=self.threads,
            variant=self.variant,
            accuracy_level=self.accuracy_level,
        )
