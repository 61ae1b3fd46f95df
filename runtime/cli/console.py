"""Shared parts of the command line: consoles, common options, tables, progress bars and errors."""

from __future__ import annotations

import json
import math
import re
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

MODEL = "Model and device"  # a panel of --help


def option(panel: str, text: str, *names: str, **settings: Any) -> Any:
    """An option that --help shows in a panel with others of its kind."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


BundleArgument = Annotated[
    Path, typer.Argument(metavar="BUNDLE", help="Bundle directory, as `mars-export onnx` writes it.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
Safe = Annotated[
    bool,
    option(
        MODEL,
        "Use --safe for bundles that you do not trust: check every hash, run neither the chat template nor a"
        " TensorRT engine, and limit memory.",
        "--safe/--trust",
    ),
]
ParseSpecial = Annotated[
    bool,
    option(
        MODEL,
        "Parse special tokens, such as <|im_end|>, in messages. By default they are plain text.",
        "--parse-special",
    ),
]
Device = Annotated[str, option(MODEL, "cpu, cuda, or cuda:1 for another GPU. A missing device is an error.")]
Strict = Annotated[bool, option(MODEL, "Fail if a GPU leaves large operators to the CPU.", "--strict")]
Name = Annotated[str, typer.Argument(metavar="NAME")]


def bytes_of(value: str | int) -> int:
    """The value of a byte option: a number, or one with K, M or G (powers of 1024)."""
    match = re.fullmatch(r"([0-9]{1,15})([KMG]?)(?:I?B)?", str(value).upper())
    if match is None:
        raise typer.BadParameter(f"a number of bytes, such as 4194304, 4M or 1G, is expected, not {value!r}")
    return int(match[1]) << 10 * " KMG".index(match[2] or " ")


Size = {"metavar": "SIZE", "parser": bytes_of}  # settings of a byte option


def with_default(name: str) -> type[TyperGroup]:
    """A group with a default subcommand: with store, `grammar BUNDLE` means `grammar store BUNDLE`."""

    class WithDefault(TyperGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if args and args[0] not in self.commands and args[0] not in ("--help", *ctx.help_option_names):
                args = [name, *args]
            return super().parse_args(ctx, args)

    return WithDefault


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block: a rich console that is interrupted while it prints
    stays silent.
    """
    signals: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if signals:
        raise KeyboardInterrupt


def at_most_cores(threads: int | None) -> int | None:
    """Clamp --threads to the number of cores, with a warning: more threads are much slower."""
    from ..machine import cores

    if threads is None or threads <= cores():
        return threads
    err.print(
        f"--threads {threads}: this machine has {cores()} cores; {cores()} threads are used", style="yellow"
    )
    return cores()


Threads = Annotated[
    int | None,
    option(
        MODEL,
        "Compute threads. By default the backend decides.",
        "--threads",
        "-t",
        metavar="N",
        min=1,
        callback=at_most_cores,
    ),
]
VariantName = Annotated[
    str | None, option(MODEL, "Variant of the bundle. By default the best one for the device.", "--variant")
]
Level = Annotated[
    int | None,
    option(
        MODEL,
        "For int4 and int8 weights: 0 computes in floating point (slow), 4 in 8 bits (fast). By default the"
        " level that the export measured.",
        "--accuracy-level",
        metavar="N",
    ),
]


def visible(text: object) -> str:
    """Foreign text, safe for a terminal: control characters and lone surrogates are escaped."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in str(text)
    )


def say(line: str) -> None:
    """Print a line that may hold foreign text: no markup, no control characters."""
    out.print(visible(line), markup=False)


@overload
def text_of(file: Path) -> str: ...
@overload
def text_of(file: Path | None) -> str | None: ...
def text_of(file: Path | None) -> str | None:
    """The text of a file that an option names. Raises MarsError if it is not UTF-8."""
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MarsError(f"{file}: not UTF-8 text ({error})") from error


class Entry(Protocol):
    """An entry of a bundle, such as a profile or a grammar, as a line of a table."""

    @property
    def cells(self) -> Sequence[str]: ...

    def to_dict(self) -> dict[str, Any]: ...


def print_list(rows: Sequence[Entry], columns: Sequence[str], otherwise: str, *, as_json: bool) -> None:
    """Print entries as a table, or `otherwise` if there are none."""
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
    # A console as wide as the table: a long line is better than broken cells.
    Console(file=out.file, highlight=False, width=max(out.width, 240)).print(table)


def print_json(value: Any) -> None:
    """Print one line of JSON, with null for infinities and NaN."""
    sys.stdout.write(json.dumps(_plain(value), ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def _plain(value: Any) -> Any:
    """`value` with null for infinities and NaN, and with lone surrogates escaped."""
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
    """Print an error on standard error; with `as_json` also as JSON on standard output."""
    if as_json:
        print_json({"error": {"kind": type(error).__name__, "message": str(error)}})
    err.print("error: ", style="bold red", end="")
    err.print(visible(error), markup=False)


def print_warning(warning: object) -> None:
    err.print("warning: ", style="yellow", end="")
    err.print(visible(warning), markup=False)


def listed(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
