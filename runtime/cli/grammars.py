"""The commands `grammar store`, `list` and `remove`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from ..terminal.console import print_json, print_list, say, text_of
from ..terminal.options import BundleArgument, File, Json, Name, takes_options, with_default

grammar_app = typer.Typer(
    cls=with_default("store"),
    no_args_is_help=True,
    help="Manage grammars for structured answers in a bundle. `mars-export grammar BUNDLE --tools FILE --name"
    " NAME` stores one (`grammar store --help`); Python and libmars use it by name.",
)
app = typer.Typer()
app.add_typer(grammar_app, name="grammar")


@dataclass(frozen=True, slots=True)
class LanguageOptions:
    """The form of answers.

    schema: Answers are JSON that satisfies this schema.
    tools: Answers call these functions: a JSON file in the form of OpenAI's API.
    regex: Answers match this regular expression.
    choice: Answers are one of these texts. Repeatable.
    separators: Item and key separator of JSON answers, by default ', ' and ': '.
    """

    schema: File = None
    tools: File = None
    regex: str | None = None
    choice: list[str] | None = None
    separators: tuple[str, str] | None = None


@grammar_app.command("store")
@takes_options
def store_grammar(
    bundle: BundleArgument,
    name: Annotated[str, typer.Option("--name", help="Name of the grammar; replaces one of this name.")],
    *,
    language: LanguageOptions,
    as_json: Json = False,
) -> None:
    """Compile a grammar and store it in a bundle.

    The language must be regular: `pattern`, `oneOf` and recursive `$ref` are refused (docs/structured.md).
    """
    from ..decode.config import GenerationConfig
    from ..structured.stored_grammars import compile_into

    config = GenerationConfig(
        schema=text_of(language.schema), tools=text_of(language.tools), regex=language.regex,
        choice=tuple(language.choice) if language.choice else None, separators=language.separators,
    )  # fmt: skip
    stored = compile_into(bundle, name, config)
    if as_json:
        print_json(asdict(stored))
        return
    say(f"{name}: {stored.kind}, {stored.states} states, {stored.file}")


@grammar_app.command("list")
def list_grammars(bundle: BundleArgument, as_json: Json = False) -> None:
    """List the grammars of a bundle."""
    from ..structured.stored_grammars import entries

    none = "no grammars; `mars-export grammar BUNDLE --tools FILE --name NAME` makes one"

    def cells(grammar: dict[str, Any]) -> tuple[object, ...]:
        size, date = f"{grammar['bytes'] / 1e3:.1f} kB", grammar["evidence"].get("date", "?")
        return grammar["name"], grammar["kind"], grammar["states"], size, date

    columns = ("grammar", "kind", "states", "size", "date")
    print_list(entries(bundle), columns, cells, none, as_json=as_json)


@grammar_app.command("remove")
def remove_grammar(bundle: BundleArgument, name: Name) -> None:
    """Remove a grammar from a bundle."""
    from ..structured.stored_grammars import remove

    remove(bundle, name)
    say(f"removed the grammar {name}")
