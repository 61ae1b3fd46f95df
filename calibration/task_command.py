"""What the commands over the rows of a task share: options, numbers with commas between, bars and results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ..runtime.cli.console import advance, at_most_cores, err, listed, print_json, progress_bars
from ..runtime.errors import MarsError

T = TypeVar("T")

TaskName = Annotated[
    str, typer.Option("--task", "-t", help="A JSONL file of rows, or a built-in task: assistant, arithmetic.")
]
TaskThreads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        min=1,
        callback=at_most_cores,
        help="Compute threads; the backend decides by default. Here -t is the task.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Folder of the report and the state; named after task and bundle."),
]
Score = Annotated[
    str | None,
    typer.Option(help="Score of rows that name none: a known one, or your own as module:function."),
]
Schema = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="A JSON schema that every answer follows, but those of rows that have a form"
        " of their own; `assistant`: the built-in schema of its 25 tools.",
    ),
]
AllowExec = Annotated[
    bool,
    typer.Option("--allow-exec", help="Allow scores that run what the model writes. There is no sandbox."),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with what an earlier run left in the output folder.")
]
Force = Annotated[bool, typer.Option("--force", help="Throw away what an earlier run left there.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Decode a few rows and say what all of them would cost.")
]


@contextmanager
def progress_of(folder: Path, what: str = "done", *, resumes: bool = True) -> Iterator[Any]:
    """Bars while something runs; Ctrl-C ends it with a word on what is kept, and on how to go on."""
    try:
        with progress_bars() as bars:
            yield advance(bars)
    except KeyboardInterrupt:
        way = ": the same command with --resume goes on" if resumes else ""
        err.print(f"stopped; what was {what} is kept in {folder}{way}", markup=False)
        raise typer.Exit(130) from None


def print_result(value: Any, as_json: bool, show: Callable[[Any], None]) -> None:
    """A result as JSON, or as `show` has it."""
    if as_json:
        print_json(value.to_dict())
    else:
        show(value)


def numbers(option: str, text: str | None, kind: Callable[[str], T]) -> tuple[T, ...]:
    """The value of an option: numbers with commas between. Raises MarsError for others."""
    try:
        return tuple(kind(word) for word in listed(text or ""))
    except ValueError as error:
        what = "whole numbers" if kind is int else "numbers"
        raise MarsError(f"{option} must be {what} with commas between, not {text!r}") from error
