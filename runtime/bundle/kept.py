"""Named things kept in a bundle, each with a file of its own: their list in the manifest is exchanged, and
the files of those that went are deleted. Knows no kind of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from .files import FileEntry
from .manifest import Manifest, at_least
from .open import write_manifest


def exchange(
    directory: Path,
    manifest: Manifest,
    changed: Manifest,
    entries: Sequence[FileEntry],
    pattern: re.Pattern[str],
) -> None:
    """Write `changed`, which has other named things than `manifest`; `entries` are the files that came with
    them. Files that match `pattern` and are named no more go when it is written.
    """
    used, ours, fresh = _named(changed), _named(manifest), {entry.path for entry in entries}
    kept = tuple(e for e in manifest.files if e.path not in fresh and (e.path not in ours or e.path in used))
    version = at_least(manifest.format_version)
    written = replace(changed, files=(*kept, *entries), format_version=version)
    write_manifest(directory, written)
    delete(directory, ours - used, written, pattern)


def delete(directory: Path, names: Iterable[str], manifest: Manifest, pattern: re.Pattern[str]) -> None:
    """Files that the manifest does not list; one that is in use elsewhere goes with the next writer."""
    listed = {entry.path for entry in manifest.files}
    for name in names:
        if pattern.fullmatch(name) and name not in listed:
            with suppress(OSError):
                (directory / name).unlink()


def _named(manifest: Manifest) -> set[str]:
    return {p.file for p in manifest.prefixes} | {g.file for g in manifest.grammars}
