"""The command `prefix`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import BundleArgument, Device, Json, Threads, print_json, say, text_of

app = typer.Typer()


@app.command()
def prefix(
    bundle: BundleArgument,
    system: Annotated[
        Path | None,
        typer.Option("--system", exists=True, dir_okay=False, help="File of a system message to store."),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove all stored entries.")] = False,
    device: Device = "cpu",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Store the prefix cache entries of a system message in a bundle, so that the first request is fast.

    Sessions on the same kind of processor, with the same library, load them with the bundle; others ignore
    them. libmars ignores them, too.
    """
    from ..session.prefix_bundle import remove_prefixes, store_prefix

    if remove == (system is not None):
        raise typer.BadParameter("give either --system or --remove")
    if system is None:
        remove_prefixes(bundle)
        say("removed the stored entries")
        return
    stored = store_prefix(bundle, text_of(system), device=device, threads=threads)
    if as_json:
        from dataclasses import asdict

        print_json(asdict(stored))
        return
    say(f"stored {stored.tokens} tokens, {stored.num_bytes / 1e6:.1f} MB")
