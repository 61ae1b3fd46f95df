"""Prefix cache entries in a bundle: those of a system message, which sessions load with the bundle."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..bundle.files import FileEntry
from ..bundle.manifest import Manifest
from ..bundle.open import rewrite
from ..decode.config import GenerationConfig
from ..decode.schedule import Limits, Schedule, run
from ..errors import SessionError
from .prefix_file import NAME, PrefixFormat
from .session import Session

ROOM = 1 << 40  # bytes of the prefix cache: as many as the context needs


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """The entries of a system message. `tokens` of the longest, `num_bytes` of all files."""

    tokens: int
    num_bytes: int
    files: tuple[str, ...]


def store_prefix(
    path: str | Path, system: str, *, device: str = "cpu", threads: int | None = None
) -> StoredPrefix:
    """Read a system message and store its entries in the bundle. Raises BundleError and SessionError."""
    session = Session.open(path, device, threads=threads, cache_bytes=ROOM)
    session.forget_prefixes()  # those that the bundle has already
    manifest, backend, policy = session.bundle.manifest, session.backend, session.policy()
    messages = [{"role": "system", "content": system}, {"role": "user", "content": ""}]
    # Sessions read prompts in larger pieces than batchers, which matters where steps are not firm.
    for limits in (Limits.of_rows(1), Limits(max_rows=1)):
        row, _ = session.new_row(0, messages, GenerationConfig(max_new_tokens=1))
        for events in run(Schedule(backend, manifest.block, manifest.mask_id, limits, policy), [row]):
            for event in events:
                if event.error is not None:
                    raise event.error
    entries = [entry for entry in session._prefixes.entries if entry.fixed]
    if not entries:
        raise SessionError(
            "the system message gives no entry: it is shorter than a piece of the prompt"
            f" ({Limits().prefill_tokens} tokens in this precision), or the chat template has no place for it"
        )
    form = PrefixFormat.of(session.bundle, session.variant, backend, session.device)
    new = {form.name(entry): b"".join(form.parts(entry)) for entry in entries}
    _replace(path, new, keep=True)
    tokens = max(entry.saved.length for entry in entries)
    return StoredPrefix(tokens, sum(map(len, new.values())), tuple(new))


def remove_prefixes(path: str | Path) -> None:
    """Remove all entries from the bundle. Raises BundleError."""
    _replace(path, {}, keep=False)


def _replace(path: str | Path, new: Mapping[str, bytes], *, keep: bool) -> None:
    def change(manifest: Manifest) -> Manifest:
        others = [f for f in manifest.files if f.path not in new and (keep or not NAME.fullmatch(f.path))]
        added = [FileEntry(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in new.items()]
        return replace(manifest, files=(*others, *added))

    rewrite(path, change, new)
