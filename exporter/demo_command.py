"""The command demo: the default checkpoint, exported and asked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..runtime.cli.console import Json, Threads, advance, err, out, print_json, progress_bars

app = typer.Typer()


@app.command()
def demo(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="BUNDLE", help="Where to keep the bundle; the user's cache by default."
        ),
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Export the default checkpoint and answer a few requests one token a step, exactly and at tau 0.95."""
    from rich.table import Table

    from .demo import answers, prepare, summarize

    with progress_bars() as bars:
        bundle = prepare(output, advance(bars))
    err.print(f"bundle: {bundle}")
    rows = []
    for answer in answers(bundle, threads):
        rows.append(answer)
        if not as_json:
            _print_answer(answer)
    if as_json:
        print_json({"bundle": str(bundle), "answers": [answer.to_dict() for answer in rows]})
        return
    table = Table(
        "mode", "tokens", "forwards", "tokens/forward", "tokens/s", "speed-up", "same text", box=None
    )
    for line in summarize(rows):
        speeds = (f"{line.tokens_per_forward:.2f}", f"{line.tokens_per_second:.1f}", f"{line.speed_up:.2f}x")
        same = f"{line.same} of {line.answers}"
        table.add_row(line.mode, str(line.tokens), str(line.forwards), *speeds, same)
    out.print()
    out.print(table)
    out.print("exact mode gives the one-token text by construction; a tau may give another for more speed")
    out.print(f"try: mars-export chat {bundle} --system 'Reply with tool calls.' --runs", markup=False)


def _print_answer(answer: Any) -> None:
    stats = answer.stats
    is_first = answer.mode == "one token"
    if is_first:
        out.print(f"\n> {answer.request}", style="bold", markup=False)
    out.print(
        f"  {answer.mode:<9} {stats.tokens_per_forward:4.2f} tokens/forward "
        f" {answer.tokens_per_second:5.1f} tokens/s  ",
        end="",
        style="cyan",
    )
    if answer.same and not is_first:
        out.print("the same text", style="dim")
    else:
        out.print(answer.text, markup=False)
