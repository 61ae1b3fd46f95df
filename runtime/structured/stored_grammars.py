"""Grammars that a bundle stores: compiling, listing and removing them, and their files."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, replace
from datetime import datetime, timezone
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..bundle.files import FileEntry
from ..bundle.manifest import Manifest, StoredGrammar
from ..bundle.open import open_bundle, rewrite
from ..decode.config import GenerationConfig
from ..errors import SessionError
from ..text.dialects import Dialect, call_forms, dialect_in
from .grammar import SEPARATORS
from .regular.automaton import Automaton, build
from .regular.expression import Expression, Repeat, choice, optional, pattern_expression, sequence, text
from .regular.schema import Separators, schema_expression

MAGIC = b"MARSDFA\x01"
HEADER = struct.Struct("<8sII")  # the magic with its version, states, edges


def to_bytes(automaton: Automaton) -> bytes:
    """The content of the file."""
    edges = [edge for state in automaton.edges for edge in state]
    sizes = [len(state) for state in automaton.edges]
    ends = bytearray(-(-len(sizes) // 8))
    for state in automaton.ends:
        ends[state // 8] |= 1 << state % 8
    return b"".join(
        [
            HEADER.pack(MAGIC, len(sizes), len(edges)),
            struct.pack(f"<{len(sizes) + 1}I", *accumulate(sizes, initial=0)),
            struct.pack(f"<{len(edges)}I", *(target for _, _, target in edges)),
            bytes(low for low, _, _ in edges),
            bytes(high for _, high, _ in edges),
            bytes(ends),
        ]
    )


def file_name(content: bytes) -> str:
    return f"grammar-{sha256(content).hexdigest()[:16]}.dfa"


def find(manifest: Manifest, name: str, where: str | Path) -> StoredGrammar:
    """The grammar `name`. Raises a SessionError that lists the known names."""
    for grammar in manifest.grammars:
        if grammar.name == name:
            return grammar
    known = ", ".join(sorted(g.name for g in manifest.grammars)) or "none"
    raise SessionError(
        f"{where}: no grammar `{name[:60]}` (there are: {known}); `mars-export grammar` makes one"
    )


def request_of(grammar: StoredGrammar) -> GenerationConfig:
    """The request that a grammar was compiled from, which llguidance compiles again. Raises SessionError."""
    request, separators = grammar.evidence.get(grammar.kind), grammar.evidence.get("separators")
    try:
        values: dict[str, Any] = {
            grammar.kind: tuple(request) if isinstance(request, list) else request,
            "separators": tuple(separators) if separators else None,
        }
        config = GenerationConfig(**values)
        if config.is_structured:
            return config
        raise SessionError(f"its {grammar.kind} is missing")
    except (SessionError, TypeError) as error:
        raise SessionError(
            f"the bundle has no request for grammar `{grammar.name}` ({error}); compile it"
            " again with `mars-export grammar`"
        ) from error


def entries(path: str | Path) -> list[dict[str, Any]]:
    """The grammars of the bundle at `path`, each with the `bytes` of its file."""
    manifest = open_bundle(path).manifest
    sizes = {entry.path: entry.size for entry in manifest.files}
    return [asdict(grammar) | {"bytes": sizes[grammar.file]} for grammar in manifest.grammars]


def store(path: str | Path, grammar: StoredGrammar, content: bytes) -> None:
    """Store a grammar in the bundle at `path`. It replaces one of the same name. Raises BundleError."""
    entry = FileEntry(grammar.file, len(content), hashlib.sha256(content).hexdigest())

    def change(manifest: Manifest) -> Manifest:
        others = (g for g in manifest.grammars if g.name != grammar.name)
        return _with(manifest, (*others, grammar), entry)

    rewrite(path, change, {grammar.file: content})


def remove(path: str | Path, name: str) -> None:
    """Remove a grammar and its file from the bundle. Raises SessionError for an unknown name."""

    def change(manifest: Manifest) -> Manifest:
        find(manifest, name, path)
        return _with(manifest, tuple(g for g in manifest.grammars if g.name != name))

    rewrite(path, change)


def _with(manifest: Manifest, grammars: tuple[StoredGrammar, ...], *new: FileEntry) -> Manifest:
    """`manifest` with these grammars and their files only."""
    unused = {g.file for g in manifest.grammars} - {g.file for g in grammars} | {entry.path for entry in new}
    files = (*(entry for entry in manifest.files if entry.path not in unused), *new)
    return replace(manifest, grammars=grammars, files=files)


def compile_into(path: str | Path, name: str, config: GenerationConfig) -> StoredGrammar:
    """Compile the grammar of `config` and store it as `name` in the bundle at `path`, with the request.

    It replaces a grammar of the same name. Raises SessionError if the language is not regular or too large,
    or if the bundle has no tokenizer; BundleError if the bundle cannot be written.
    """
    if config.schema is not None and config.tools is not None:
        what = "schema and tools exclude each other in a stored grammar: give one of them"
        raise SessionError(what, field="schema")
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
        raise SessionError("no grammar to compile: give a schema, tools, a regex or choices", field="schema")
    try:
        return build(_expression(config, dialect, separators))
    except RecursionError as error:
        raise SessionError(
            "the grammar is nested too deeply; make it flatter", field=config.structure
        ) from error
    except SessionError as error:
        error.field = config.structure
        raise


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
