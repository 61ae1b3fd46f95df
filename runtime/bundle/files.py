"""The files of a bundle: safe names, sizes, hashes, whole writes, a lock.

A bundle may be somebody else's: no name in it is trusted.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from ..errors import BundleError, listed
from ..hashes import sha256_of
from ..machine import cache_dir
from .external import external_names

SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
# Of scratch files of what is rewritten in a bundle, and of the files of prefixes and grammars: nothing that a
# user would name.
STORED = r"(prefix-[0-9a-f]{16}\.kv|grammar-[0-9a-f]{16}\.dfa)"
LEFT_OVER = re.compile(rf"\.(manifest\.(json|sha256)|{STORED})\.[0-9a-f]{{16}}|{STORED}")
STAMPS, STAMP_LIMIT, MOST_STAMPS = "verified", 1_000_000, 256
PLAIN = getattr(os, "O_NONBLOCK", 0) | getattr(
    os, "O_CLOEXEC", 0
)  # a pipe in a file's place must not stop us
NO_LINK = getattr(os, "O_NOFOLLOW", 0)


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
        digest = sha256_of(file)
    return FileEntry(path.name, path.stat().st_size, digest)


def read_small(path: Path, limit: int) -> bytes:
    """At most `limit` bytes of a file, and one more if it is longer.

    Raises OSError for what is not a plain file, links included.
    """
    with _opened(path, NO_LINK) as file:
        return _read(file, limit + 1)


def _read(file: int, most: int) -> bytes:
    pieces = []
    while most > 0 and (piece := os.read(file, min(most, 1 << 20))):
        pieces.append(piece)
        most -= len(piece)
    return b"".join(pieces)


@contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    """A descriptor of a regular file. Pipes and devices are not waited for."""
    file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | PLAIN | flags)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield file
    finally:
        os.close(file)


def write_whole(path: Path, content: bytes) -> None:
    """Put `content` in place of a file, whole or not at all, and on the disk before anything that follows.

    The scratch file beside it has a name that nobody can foresee, and is never one that is there: no planted
    link is followed.
    """
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | NO_LINK
    with os.fdopen(os.open(scratch, flags, 0o666), "wb") as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)


def clear_leftovers(directory: Path, listed: Collection[str]) -> None:
    """Delete what a writer that was killed left: scratch files, prefixes and grammars that no
    manifest lists.

    Only for the one who alone writes to `directory`.
    """
    with suppress(OSError):
        for path in directory.iterdir():
            if path.name not in listed and LEFT_OVER.fullmatch(path.name):
                with suppress(OSError):
                    path.unlink()


@contextmanager
def locked(directory: Path, wait: float) -> Iterator[bool]:
    """The only writer of `directory` among those that ask; False where nobody can know that.

    Raises BundleError when another one keeps it for `wait` seconds.

    The directory itself is locked, so that nothing is left behind; where a file system knows no locks,
    nothing is.
    """
    if fcntl is None:
        yield False
        return
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise BundleError(f"{directory}: cannot be opened ({error.strerror})") from error
    end = time.monotonic() + wait
    try:
        while (got := _try_lock(handle)) is False:
            if time.monotonic() > end:
                raise BundleError(
                    f"{directory}: another program has been writing to it for {wait:.0f} s; try again"
                )
            time.sleep(0.01)
        yield got is True
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool | None:
    """Whether the lock is ours; None on a file system without locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def verify(
    directory: Path, entries: Iterable[FileEntry], graphs: Collection[str] = (), *, full: bool = False
) -> None:
    """Check presence, links, sizes and hashes of all files; raises one BundleError that lists everything
    wrong.

    The external data of `graphs` (ONNX files) must be among the files. A file that was found good and whose
    stamp (size, times and inode) is that of then is not looked into again, unless `full`.
    """
    entries = list(entries)
    names = {entry.path for entry in entries}
    place = _stamp_file(directory)
    stamps = {} if full or place is None else _read_stamps(place)
    problems, seen = [], {}
    for entry in entries:
        try:
            seen[entry.path] = _check(directory, entry, stamps, names if entry.path in graphs else None)
        except (OSError, ValueError) as error:
            what = error.strerror if isinstance(error, OSError) else error
            problems.append(f"{entry.path}: {what}")
    if problems:
        raise BundleError(
            f"{directory}: damaged or incomplete:{listed(problems)}\n  copy or export the bundle again"
        )
    if seen != stamps and place is not None:
        _write_stamps(place, seen)


def _check(
    directory: Path, entry: FileEntry, stamps: dict[str, list[object]], names: Collection[str] | None
) -> list[object]:
    """The stamp of a good file; raises ValueError or OSError for a bad one.

    `names`: what a graph may refer to.
    """
    path = directory / entry.path
    # realpath, because Path.resolve raises RuntimeError for links in a circle.
    if path.is_symlink() and Path(os.path.realpath(directory)) not in Path(os.path.realpath(path)).parents:
        raise ValueError("a link that leads out of the bundle")
    if not path.is_file():
        raise ValueError("missing")
    with _opened(path) as file:
        state = os.fstat(file)
        stamp = [
            entry.sha256,
            state.st_size,
            state.st_mtime_ns,
            state.st_ctime_ns,
            state.st_ino,
            state.st_dev,
        ]
        if state.st_size != entry.size:
            raise ValueError(f"{state.st_size} bytes, the manifest says {entry.size}")
        if stamps.get(entry.path) == stamp:
            return stamp
        with os.fdopen(os.dup(file), "rb") as content:
            if sha256_of(content) != entry.sha256:
                raise ValueError("its content does not match the manifest's sha256")
        if names is not None:
            _check_external(file, names)
    return stamp


def _check_external(graph: int, names: Collection[str]) -> None:
    for name in sorted(external_names(graph)):
        if name not in names:
            raise ValueError(f"the graph takes data from {name[:80]!r}, which `files` does not list")


def _stamp_file(directory: Path) -> Path | None:
    """Where it is remembered that the files of this bundle were good: with the user, for a bundle can say
    anything about itself.
    """
    cache = cache_dir()
    name = hashlib.sha256(os.fsencode(os.path.realpath(directory))).hexdigest()[:32]
    return None if cache is None else cache / STAMPS / f"{name}.json"


def _read_stamps(file: Path) -> dict[str, list[object]]:
    try:
        value = json.loads(read_small(file, STAMP_LIMIT))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _write_stamps(file: Path, stamps: dict[str, list[object]]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(file, json.dumps(stamps).encode("ascii"))
        others = sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        for path in others[:-MOST_STAMPS]:
            path.unlink(missing_ok=True)
    except OSError:
        pass  # without a place for it every start hashes all files
