"""The files of a bundle: safe names, sizes, hashes, and a stamp that spares hashing gigabytes at every start."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import BundleError

STAMP_FILE = ".verified.json"
SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a bundle. `path` is a plain name inside it, `size` in bytes, `sha256` in lower-case hex."""

    path: str
    size: int
    sha256: str


def is_safe_name(name: str) -> bool:
    """Whether `name` is a plain file name: no directories, no drive, no leading dot."""
    return SAFE_NAME.fullmatch(name) is not None


def describe(path: Path) -> FileEntry:
    """Measure and hash one file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(path.name, path.stat().st_size, digest)


def verify(directory: Path, entries: Iterable[FileEntry], *, full: bool = False) -> None:
    """Check presence, links, sizes and hashes of all files; raises one BundleError that lists everything wrong.

    A file whose size and modification time equal those of its last successful check is not hashed again, unless `full`.
    """
    stamps = {} if full else _read_stamps(directory)
    problems, seen = [], {}
    for entry in entries:
        problem = _problem(directory, entry, stamps)
        if problem:
            problems.append(f"{entry.path}: {problem}")
        else:
            seen[entry.path] = _stamp(directory / entry.path, entry)
    if problems:
        raise BundleError(
            f"{directory}: damaged or incomplete:\n  "
            + "\n  ".join(problems)
            + "\n  copy or export the bundle again"
        )
    if seen != stamps:
        _write_stamps(directory, seen)


def _problem(directory: Path, entry: FileEntry, stamps: dict[str, list[object]]) -> str | None:
    path = directory / entry.path
    if path.is_symlink() and directory.resolve() not in path.resolve().parents:
        return "a link that leads out of the bundle"
    if not path.is_file():
        return "missing"
    size = path.stat().st_size
    if size != entry.size:
        return f"{size} bytes, the manifest says {entry.size}"
    if stamps.get(entry.path) == _stamp(path, entry):
        return None
    return (
        None if describe(path).sha256 == entry.sha256 else "its content does not match the manifest's sha256"
    )


def _stamp(path: Path, entry: FileEntry) -> list[object]:
    state = path.stat()
    return [entry.sha256, state.st_size, state.st_mtime_ns, state.st_ino]


def _read_stamps(directory: Path) -> dict[str, list[object]]:
    try:
        value = json.loads((directory / STAMP_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write_stamps(directory: Path, stamps: dict[str, list[object]]) -> None:
    try:
        scratch = directory / f"{STAMP_FILE}.{os.getpid()}"
        scratch.write_text(json.dumps(stamps), encoding="utf-8")
        os.replace(scratch, directory / STAMP_FILE)
    except OSError:
        pass  # a read-only bundle is checked in full each time
