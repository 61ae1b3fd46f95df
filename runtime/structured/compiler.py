"""Compiling schemas, regular expressions, choices and tools to automata that a bundle stores."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

from ..bundle.manifest import StoredGrammar
from ..bundle.open import open_bundle
from ..decode.config import GenerationConfig
from ..errors import SessionError
from ..text.dialects import Dialect, call_forms, dialect_in
from .automaton_file import file_name, to_bytes
from .catalog import store
from .grammar import SEPARATORS
from .regular.automaton import Automaton, build
from .regular.expression import Expression, Repeat, choice, optional, sequence, text
from .regular.pattern import pattern_expression
from .regular.schema import Separators, schema_expression


def compile_into(path: str | Path, name: str, config: GenerationConfig) -> StoredGrammar:
    """Compile the grammar of `config` and store it as `name` in the bundle at `path`, with the request.

    It replaces a grammar of the same name. Raises SessionError if the language is not regular or too large,
    or if the bundle has no tokenizer; BundleError if the bundle cannot be written.
    """
    if config.schema is not None and config.tools is not None:
        raise SessionError("schema and tools exclude each other in a stored grammar: give one of them")
    manifest = open_bundle(path).manifest
    if manifest.text is None:
        raise SessionError(f"{path}: a grammar needs a tokenizer, this bundle has none")
    separators = config.separators or SEPARATORS
    automaton = compile_grammar(config, dialect_in(manifest.text), separators)
    content = to_bytes(automaton)
    kind = next(kind for kind in ("schema", "regex", "choice", "tools") if getattr(config, kind) is not None)
    grammar = StoredGrammar(
        name=name,
        file=file_name(content),
        kind=kind,
        states=len(automaton.edges),
        evidence={
            kind: getattr(config, kind),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            **({"separators": list(separators)} if kind in ("schema", "tools") else {}),
        },
    )
    store(path, grammar, content)
    return grammar


def compile_grammar(config: GenerationConfig, dialect: Dialect, separators: Separators) -> Automaton:
    """The automaton of the answers that `config` allows. Raises SessionError."""
    if not config.is_structured:
        raise SessionError("no grammar to compile: give a schema, tools, a regex or choices")
    try:
        return build(_expression(config, dialect, separators))
    except RecursionError as error:
        raise SessionError("the grammar is nested too deeply; make it flatter") from error


def _expression(config: GenerationConfig, dialect: Dialect, separators: Separators) -> Expression:
    if config.regex is not None:
        return pattern_expression(config.regex)
    if config.choice is not None:
        return choice(map(text, config.choice))
    if config.schema is not None:
        assert isinstance(config.schema, str), "a config holds schemas as JSON text"
        return schema_expression(json.loads(config.schema), separators)
    assert isinstance(config.tools, str), "a config holds tools as JSON text"
    forms = [
        sequence(text(begin), schema_expression(schema, separators, "tools"), text(end))
        for begin, schema, end in call_forms(json.loads(config.tools), dialect)
    ]
    call, line = choice(forms), optional(text("\n"))
    return sequence(call, Repeat(sequence(line, call), 0, None), line) if dialect.repeats else call
