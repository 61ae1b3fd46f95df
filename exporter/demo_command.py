"""The command `demo`: exports the default checkpoint and answers a few requests with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..runtime.terminal.console import advance, err, out, print_json, progress_bars
from ..runtime.terminal.options import Json, Threads

app = typer.Typer()


@app.command()
def demo(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="BUNDLE",
            help="The bundle directory to write; by default in the user's cache.",
        ),
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Export the default checkpoint and answer a few requests: one token a step, exact, and at tau 0.95."""
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
    out.print("exact mode always gives the text of one token a step; a tau is faster and may change the text")
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
        out.print("same text", style="dim")
    else:
        out.print(answer.text, markup=False)
