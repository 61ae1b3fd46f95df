"""What requests may ask of the form of an answer, compiled once and stored in a bundle. Knows no command and
no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..bundle.manifest import StoredGrammar
from ..bundle.open import open_bundle
from ..decode.config import GenerationConfig
from ..errors import SessionError
from ..text import toolcalls
from .automaton_file import file_name, written
from .bundled import check_name, store
from .regular.automaton import Automaton, built
from .regular.expression import Choice, Expression, Interrupted, choice, sequence, text
from .regular.pattern import pattern_expression
from .regular.schema import Separators, schema_expression

SEPARATORS = (", ", ": ")


def make(
    path: str | Path, name: str, config: GenerationConfig, evidence: Mapping[str, Any] | None = None
) -> StoredGrammar:
    """Compile what `config` asks of the form of an answer and store it in the bundle at `path` as `name`.

    One of the same name is replaced. Raises SessionError for what is no regular language or too large, and
    for a bundle without a tokenizer; BundleError where the bundle cannot be written.
    """
    check_name(name)
    manifest = open_bundle(path).manifest
    if manifest.text is None:
        raise SessionError(f"{path}: a grammar needs a tokenizer, this bundle has none")
    separators = config.separators or SEPARATORS
    automaton = compiled(config, toolcalls.dialect_of(manifest.text.chat_template), separators)
    content = written(automaton)
    kind = next(kind for kind in ("schema", "regex", "choice", "tools") if getattr(config, kind) is not None)
    grammar = StoredGrammar(
        name=name,
        file=file_name(content),
        kind=kind,
        states=len(automaton.edges),
        evidence={
            **(evidence or {}),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            **({"separators": list(separators)} if kind in ("schema", "tools") else {}),
        },
    )
    store(path, grammar, content)
    return grammar


def compiled(config: GenerationConfig, dialect: toolcalls.Dialect, separators: Separators) -> Automaton:
    """The automaton of the answers that `config` allows. Raises SessionError as `make` does."""
    if not config.is_structured:
        raise SessionError("give what the answer must look like: a schema, tools, a regex or choices")
    try:
        return built(_expression(config, dialect, separators))
    except RecursionError as error:
        raise SessionError("the grammar is nested too deep; make it flatter") from error


def _expression(config: GenerationConfig, dialect: toolcalls.Dialect, separators: Separators) -> Expression:
    if config.regex is not None:
        return pattern_expression(config.regex)
    if config.choice is not None:
        return choice(map(text, config.choice))
    if config.schema is not None:
        assert isinstance(config.schema, str), "a config says what is asked for, and holds JSON text"
        return schema_expression(json.loads(config.schema), separators)
    assert isinstance(config.tools, str), "a config says what is asked for, and holds JSON text"
    tools = json.loads(config.tools)
    if dialect == "list":
        return schema_expression(toolcalls.list_schema(tools), separators, "tools")
    return Interrupted(toolcalls.OPEN.encode(), _calls(tools, separators))


def _calls(tools: Sequence[dict[str, Any]], separators: Separators) -> Expression:
    """What stands behind the tag that opens a call."""
    item, key = separators
    return Choice(
        tuple(
            sequence(
                text(f'\n{{"name"{key}{_name(tool)}{item}"arguments"{key}'),
                schema_expression(toolcalls.parameters(tool), separators, f"tool {tool['function']['name']}"),
                text(f"}}\n{toolcalls.CLOSE}"),
            )
            for tool in tools
        )
    )


def _name(tool: Mapping[str, Any]) -> str:
    return json.dumps(tool["function"]["name"], ensure_ascii=False)
