"""What the command line has in common: its two consoles, options that several commands take, tables, bars and
errors. Knows no command.
"""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, overload

import typer
from rich.console import Console
from typer.core import TyperGroup

from ..errors import MarsError

if TYPE_CHECKING:
    from rich.progress import Progress

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

BundleArgument = Annotated[
    Path, typer.Argument(metavar="BUNDLE", help="A bundle directory, as `mars-export onnx` writes it.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
Safe = Annotated[
    bool,
    typer.Option(
        "--safe/--trust",
        help="For bundles that you do not trust: hash everything, run no chat template and no engine, take"
        " no more than a bundle needs.",
    ),
]
ParseSpecial = Annotated[
    bool,
    typer.Option(
        "--parse-special",
        help="The text of a special token, such as <|im_end|>, is that token in messages, too."
        " By default it is plain text there.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="cpu, cuda, or cuda:1 for another GPU. A missing device is an error, never a silent CPU."
    ),
]


Strict = Annotated[
    bool,
    typer.Option("--strict", help="Refuse a GPU that leaves operators on hidden states to the CPU."),
]

Name = Annotated[str, typer.Argument(metavar="NAME")]


class StoreUnlessNamed(TyperGroup):
    """`prefix BUNDLE ...` stores: what is not the name of a subcommand is the bundle, or an option of it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", *ctx.help_option_names):
            args = ["store", *args]
        return super().parse_args(ctx, args)


@contextmanager
def held() -> Iterator[None]:
    """A Ctrl-C that comes in here is raised at the end: a console that is interrupted while it prints keeps
    all later words to itself.
    """
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def at_most_cores(threads: int | None) -> int | None:
    """--threads, or all cores and a word where that is more than there are: waiting threads cost minutes."""
    from ..machine import cores

    if threads is None or threads <= cores():
        return threads
    err.print(
        f"--threads {threads}: this machine has {cores()} cores; {cores()} threads are used", style="yellow"
    )
    return cores()


Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        "-t",
        metavar="N",
        min=1,
        callback=at_most_cores,
        help="Compute threads; the backend decides by default.",
    ),
]
VariantName = Annotated[
    str | None,
    typer.Option("--variant", help="Which variant of the bundle to open, instead of the one that fits best."),
]
Metric = Annotated[
    str | None,
    typer.Option(
        help="What tau bounds: probability, margin (top-2) or entropy (nats)."
        " The last two need --metrics at export."
    ),
]
Level = Annotated[
    int | None,
    typer.Option(
        "--accuracy-level", help="int4 and int8 weights: 0 is exact and slow, 4 is fast (8-bit activations)."
    ),
]


def visible(text: object) -> str:
    """Text of others without what a terminal obeys or cannot show: control characters and lone surrogates are
    written out.
    """
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in str(text)
    )


def say(line: str) -> None:
    """A line with words of the bundle in it: no markup, nothing that a terminal obeys."""
    out.print(visible(line), markup=False)


@overload
def text_of(file: Path) -> str: ...
@overload
def text_of(file: Path | None) -> str | None: ...
def text_of(file: Path | None) -> str | None:
    """A file that an option names, where it does. Raises MarsError for what is no text."""
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MarsError(f"{file}: not UTF-8 text ({error})") from error


class Described(Protocol):
    """What a bundle keeps, in words: a profile, a prefix, a grammar."""

    @property
    def cells(self) -> Sequence[str]: ...

    def to_dict(self) -> dict[str, Any]: ...


def print_list(rows: Sequence[Described], columns: Sequence[str], otherwise: str, *, as_json: bool) -> None:
    """What a bundle keeps, as a table; `otherwise` is said where that is nothing."""
    if as_json:
        print_json([row.to_dict() for row in rows])
    elif not rows:
        out.print(otherwise, markup=False)
    else:
        print_table(columns, [row.cells for row in rows])


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, of_numbers: bool = False) -> None:
    from rich.markup import escape
    from rich.table import Column, Table

    table = Table(*(Column(name, justify="right" if of_numbers else "left") for name in columns), box=None)
    for row in rows:
        table.add_row(*(escape(visible(cell)) for cell in row))
    # A console as wide as the table, wherever the output goes: a long line is better than cells broken apart.
    Console(file=out.file, highlight=False, width=max(out.width, 240)).print(table)


def print_json(value: Any) -> None:
    """One line of JSON; what JSON has no number for is null."""
    sys.stdout.write(json.dumps(_plain(value), ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def _plain(value: Any) -> Any:
    """`value` with null for infinities and NaN, and with lone surrogates written out."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def progress_bars() -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)


def advance(bars: Progress) -> Any:
    """A progress callback (phase, done, total): a bar for each phase, or a line for it if standard error is
    not a terminal.
    """
    tasks: dict[str, Any] = {}

    def report(phase: str, done: int, total: int) -> None:
        if phase not in tasks:
            if bars.disable:
                err.print(f"{phase} ...", markup=False)
            tasks[phase] = bars.add_task(phase, total=total)
        bars.update(tasks[phase], completed=done)

    return report


def print_error(error: MarsError, *, as_json: bool = False) -> None:
    """For people on standard error; with `as_json` for programs, too, where they read results."""
    if as_json:
        print_json({"error": {"kind": type(error).__name__, "message": str(error)}})
    err.print("error: ", style="bold red", end="")
    err.print(visible(error), markup=False)


def print_warning(warning: object) -> None:
    err.print("warning: ", style="yellow", end="")
    err.print(visible(warning), markup=False)


def listed(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
