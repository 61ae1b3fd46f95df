"""The commands `grammar store`, `list`, `show` and `remove`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..terminal.console import print_json, print_list, print_table, say, text_of
from ..terminal.options import BundleArgument, Json, Name, with_default

grammar_app = typer.Typer(
    cls=with_default("store"),
    no_args_is_help=True,
    help="Manage grammars for structured answers in a bundle. `mars-export grammar BUNDLE --tools FILE --name"
    " NAME` stores one (`grammar store --help`); Python and libmars use it by name.",
)
app = typer.Typer()
app.add_typer(grammar_app, name="grammar")


@grammar_app.command("store")
def store_grammar(
    bundle: BundleArgument,
    name: Annotated[str, typer.Option("--name", help="Name of the grammar; replaces one of this name.")],
    schema: Annotated[
        Path | None,
        typer.Option(
            "--schema", exists=True, dir_okay=False, help="Answers are JSON that satisfies this schema."
        ),
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            "--tools",
            exists=True,
            dir_okay=False,
            help="Answers call these functions: a JSON file in the form of OpenAI's API.",
        ),
    ] = None,
    regex: Annotated[
        str | None, typer.Option("--regex", help="Answers match this regular expression.")
    ] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option("--choice", help="Answers are one of these texts. Repeatable."),
    ] = None,
    separators: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--separators",
            help="Item and key separator of JSON answers, by default ', ' and ': '.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile a grammar and store it in a bundle.

    The language must be regular: `pattern`, `oneOf` and recursive `$ref` are refused (docs/structured.md).
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
    stored = compile_into(bundle, name, config, files | ({"regex": regex} if regex is not None else {}))
    if as_json:
        from dataclasses import asdict

        print_json(asdict(stored))
        return
    say(f"{name}: {stored.kind}, {stored.states} states, {stored.file}")


@grammar_app.command("list")
def list_grammars(bundle: BundleArgument, as_json: Json = False) -> None:
    """List the grammars of a bundle."""
    from ..structured.catalog import entries

    none = "no grammars; `mars-export grammar BUNDLE --tools FILE --name NAME` makes one"
    print_list(entries(bundle), ("grammar", "kind", "states", "size", "date"), none, as_json=as_json)


@grammar_app.command("show")
def show_grammar(bundle: BundleArgument, name: Name, as_json: Json = False) -> None:
    """Show a grammar and its source."""
    from ..structured.catalog import entries

    [row] = entries(bundle, name)
    if as_json:
        print_json(row.to_dict())
    else:
        print_table(("grammar", ""), row.settings)


@grammar_app.command("remove")
def remove_grammar(bundle: BundleArgument, name: Name) -> None:
    """Remove a grammar from a bundle."""
    from ..structured.catalog import remove

    remove(bundle, name)
    say(f"removed the grammar {name}")
