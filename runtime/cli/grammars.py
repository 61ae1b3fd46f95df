"""The commands about grammars kept in a bundle: grammar BUNDLE, grammar list, show, remove. Parse, one call,
print.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import (
    BundleArgument,
    Json,
    Name,
    StoreUnlessNamed,
    print_json,
    print_list,
    print_table,
    say,
    text_of,
)

grammar_app = typer.Typer(
    cls=StoreUnlessNamed,
    no_args_is_help=True,
    help="What answers must look like, compiled once and kept in a bundle: Python and libmars follow it."
    " `mars-export grammar BUNDLE --tools FILE --name NAME` stores one (`grammar store --help`).",
)
app = typer.Typer()
app.add_typer(grammar_app, name="grammar")


@grammar_app.command("store")
def store_grammar(
    bundle: BundleArgument,
    name: Annotated[str, typer.Option("--name", help="What it is called; one of this name is replaced.")],
    schema: Annotated[
        Path | None,
        typer.Option("--schema", exists=True, dir_okay=False, help="Answers are JSON of this schema."),
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            "--tools",
            exists=True,
            dir_okay=False,
            help="Answers call these functions (JSON, OpenAI's form).",
        ),
    ] = None,
    regex: Annotated[
        str | None, typer.Option("--regex", help="Answers match this regular expression.")
    ] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option("--choice", help="Answers are one of these; give it several times."),
    ] = None,
    separators: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--separators",
            help="Separators between JSON items and after a key. Default: as the checkpoint writes them.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile what answers must look like, and store it in the bundle.

    What is no regular language is refused by its name: `pattern`, `oneOf`, a `$ref` to itself
    (docs/structured.md).
    """
    from ..decode.config import GenerationConfig
    from ..structured.compiler import compile_into

    config = GenerationConfig(
        schema=text_of(schema),
        tools=text_of(tools),
        regex=regex,
        choice=tuple(choice) if choice else None,
        separators=separators,
    )
    files = {option: file.name for option, file in (("schema", schema), ("tools", tools)) if file is not None}
    made = compile_into(bundle, name, config, files | ({"regex": regex} if regex is not None else {}))
    if as_json:
        from dataclasses import asdict

        print_json(asdict(made))
        return
    say(f"{name}: {made.kind}, {made.states} states, {made.file}")


@grammar_app.command("list")
def list_grammars(bundle: BundleArgument, as_json: Json = False) -> None:
    """List a bundle's grammars."""
    from ..structured.catalog import entries

    none = "no grammars; `mars-export grammar BUNDLE --tools FILE --name NAME` makes one"
    print_list(entries(bundle), ("grammar", "kind", "states", "size", "date"), none, as_json=as_json)


@grammar_app.command("show")
def show_grammar(bundle: BundleArgument, name: Name, as_json: Json = False) -> None:
    """Show a grammar and what it was compiled from."""
    from ..structured.catalog import entries

    [row] = entries(bundle, name)
    if as_json:
        print_json(row.to_dict())
    else:
        print_table(("grammar", ""), row.settings)


@grammar_app.command("remove")
def remove_grammar(bundle: BundleArgument, name: Name) -> None:
    """Take a grammar out of a bundle, and its file."""
    from ..structured.catalog import remove

    remove(bundle, name)
    say(f"removed the grammar {name}")
