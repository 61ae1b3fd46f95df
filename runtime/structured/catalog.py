"""The grammars of a bundle: listing, storing and removing them."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..bundle.files import FileEntry
from ..bundle.manifest import Manifest, StoredGrammar
from ..bundle.open import open_bundle, rewrite
from ..decode.config import GenerationConfig
from ..errors import SessionError


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A grammar and the size of its file."""

    grammar: StoredGrammar
    num_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self.grammar) | {"bytes": self.num_bytes}

    @property
    def cells(self) -> tuple[str, ...]:
        """Name, kind, states, size and date, as text."""
        g = self.grammar
        size = f"{self.num_bytes / 1e3:.1f} kB"
        return (g.name, g.kind, str(g.states), size, str(g.evidence.get("date", "?")))


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
            f"the bundle does not say what grammar `{grammar.name}` was compiled from ({error}); compile it"
            " again with `mars-export grammar`"
        ) from error


def entries(path: str | Path) -> list[CatalogEntry]:
    """The grammars of the bundle at `path`."""
    manifest = open_bundle(path).manifest
    sizes = {entry.path: entry.size for entry in manifest.files}
    return [CatalogEntry(grammar, sizes[grammar.file]) for grammar in manifest.grammars]


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
