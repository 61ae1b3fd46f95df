"""The commands about prefixes kept in a bundle: prefix BUNDLE, prefix list, show, remove. Parse, one call,
print.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .console import (
    BundleArgument,
    Device,
    Json,
    Level,
    Name,
    StoreUnlessNamed,
    Threads,
    VariantName,
    out,
    print_json,
    print_list,
    print_table,
    say,
    text_of,
)
from .errors import MarsError

prefix_app = typer.Typer(
    cls=StoreUnlessNamed,
    no_args_is_help=True,
    help="KV entries of a prompt's beginning, kept in a bundle: its first request need not read them."
    " `mars-export prefix BUNDLE --system FILE --name NAME` stores one (`prefix store --help`).",
)
app = typer.Typer()
app.add_typer(prefix_app, name="prefix")


@prefix_app.command("store")
def store_prefix(
    bundle: BundleArgument,
    name: Annotated[str, typer.Option("--name", help="What it is called; one of this name is replaced.")],
    system: Annotated[
        Path | None,
        typer.Option(
            "--system",
            exists=True,
            dir_okay=False,
            help="The system message: a text file; a line end at its end is not part of it.",
        ),
    ] = None,
    messages: Annotated[
        Path | None,
        typer.Option(
            "--messages",
            exists=True,
            dir_okay=False,
            help="Messages that prompts begin with: a JSON list of {role, content}.",
        ),
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            "--tools",
            exists=True,
            dir_okay=False,
            help="Functions that the prompts tell of, too (JSON, OpenAI's form).",
        ),
    ] = None,
    prefill_tokens: Annotated[
        list[int] | None,
        typer.Option(
            "--prefill-tokens",
            min=1,
            help="A Batcher's prefill_tokens, where it is not the default and entries depend on it"
            " (fp16, int8, int4, GPUs). May be given several times.",
        ),
    ] = None,
    device: Device = "cpu",
    variant: VariantName = None,
    threads: Threads = None,
    accuracy_level: Level = None,
    as_json: Json = False,
) -> None:
    """Read the beginning of a prompt once and store its KV entries in the bundle.

    Sessions of this bundle begin with them at the first request already. Run it on the machine, or one like
    it, where the bundle will serve.
    """
    from .prefix_maker import SIZES, Beginning, make
    from .session import Session

    if (system is None) == (messages is None):
        raise MarsError("give the beginning of the prompts: --system FILE or --messages FILE, one of them")
    functions = text_of(tools)
    if system is not None:
        begin = Beginning.of_system(text_of(system).removesuffix("\n"), functions)
    else:
        assert messages is not None
        begin = Beginning.of_json(text_of(messages), str(messages), functions)
    session = Session.open(
        bundle, device, threads=threads, variant=variant, accuracy_level=accuracy_level, cache_bytes=0
    )
    given = {"system": system, "messages": messages, "tools": tools}
    evidence: dict[str, Any] = {option: file.name for option, file in given.items() if file is not None}
    if prefill_tokens:
        evidence["prefill_tokens"] = sorted(prefill_tokens)
    made = make(session, name, begin.ids(session), evidence, prefill_tokens or SIZES)
    if as_json:
        from dataclasses import asdict

        print_json([asdict(prefix) for prefix in made])
        return
    sizes = {entry.path: entry.size for entry in _files(bundle)}
    for prefix in made:
        pieces = "" if prefix.piece is None else f", pieces of {prefix.piece}"
        say(
            f"{name}: {prefix.length} tokens on {prefix.variant} ({prefix.device}{pieces}),"
            f" {sizes[prefix.file] / 1e6:.1f} MB"
        )


@prefix_app.command("list")
def list_prefixes(bundle: BundleArgument, as_json: Json = False) -> None:
    """List a bundle's prefixes and say which are stale."""
    from .bundle.prefixes import described

    columns = ("prefix", "tokens", "size", "variant", "device", "pieces", "date", "state")
    none = "no prefixes; `mars-export prefix BUNDLE --system FILE --name NAME` makes one"
    print_list(described(bundle), columns, none, as_json=as_json)


@prefix_app.command("show")
def show_prefix(bundle: BundleArgument, name: Name, as_json: Json = False) -> None:
    """Show a prefix, what made it, and how it begins and ends."""
    from .bundle.prefixes import described

    for row in described(bundle, name):
        if as_json:
            print_json(row.to_dict())
            continue
        print_table(("prefix", ""), row.settings)
        out.print()
        print_table(("made from", ""), row.evidence)
        if row.stale:
            say(f"\nmake it again with: {row.renewal}")


@prefix_app.command("remove")
def remove_prefix(bundle: BundleArgument, name: Name) -> None:
    """Take a prefix out of a bundle, and its file."""
    from .bundle.prefixes import remove

    say(f"removed {remove(bundle, name)} prefix(es) named {name}")


def _files(bundle: Path) -> Any:
    from .bundle.open import open_bundle

    return open_bundle(bundle).manifest.files
