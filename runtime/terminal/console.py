"""Shared parts of the command line: consoles, common options, tables, progress bars and errors."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..errors import MarsError

if TYPE_CHECKING:
    from rich.progress import Progress

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block: a rich console that is interrupted stays silent."""
    signals: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if signals:
        raise KeyboardInterrupt


def visible(text: object) -> str:
    """Foreign text, safe for a terminal: control characters and lone surrogates are escaped."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in str(text)
    )


def say(line: str) -> None:
    """Print a line that may hold foreign text: no markup, no control characters."""
    out.print(visible(line), markup=False)


def text_of(file: Path | None) -> str | None:
    """The text of a file that an option names. Raises MarsError if it is not UTF-8."""
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MarsError(f"{file}: not UTF-8 text ({error})") from error


def print_list(
    rows: Sequence[dict[str, Any]],
    columns: Sequence[str],
    cells: Callable[[dict[str, Any]], Sequence[object]],
    otherwise: str,
    *,
    as_json: bool,
) -> None:
    """Print the entries of a bundle as a table of their `cells`, or `otherwise` if there are none."""
    if as_json:
        print_json(rows)
    elif not rows:
        out.print(otherwise, markup=False)
    else:
        print_table(columns, [list(map(str, cells(row))) for row in rows])


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


PROGRESS_SECONDS = 10.0  # between the lines of a long phase without a terminal


def progress_bars() -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[note]}"),
    )
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)


def advance(bars: Progress) -> Any:
    """A progress callback (phase, done, total, note): a bar for each phase, or if standard error is not a
    terminal, a line at its beginning and every ten seconds. Both say how long the phase will still take.
    A phase with nothing to do is its note alone.
    """
    tasks: dict[str, Any] = {}
    begun: dict[str, tuple[float, int]] = {}  # when a phase began, and what was done by then
    printed = monotonic()

    def report(phase: str, done: int, total: int, note: str = "") -> None:
        nonlocal printed
        if not total and note:
            err.print(f"{phase}: {note}", markup=False)
            return
        since, first = begun.setdefault(phase, (monotonic(), done))
        words = [note]
        if total > done > first and "left" not in note:
            left = (monotonic() - since) / (done - first) * (total - done)
            words.append(f"about {left:.0f} s left" if left < 120 else f"about {left / 60:.0f} min left")
        note = ", ".join(filter(None, words))
        if bars.disable and (phase not in tasks or monotonic() - printed >= PROGRESS_SECONDS):
            line = ", ".join(filter(None, [f"{done} of {total}", note])) if phase in tasks else "..."
            err.print(f"{phase} {line}", markup=False)
            printed = monotonic()
        if phase not in tasks:
            tasks[phase] = bars.add_task(phase, total=total, note=note)
        bars.update(tasks[phase], completed=done, total=total, note=note)

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
