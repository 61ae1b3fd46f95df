"""The files of a bundle: safe names, sizes, hashes, whole writes, a lock.

A bundle may be somebody else's: no name in it is trusted.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
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
from .external import contents
from .held import PLAIN, Held, State
from .safe import REMEDY
from .scratch import FILE as SCRATCH_FILE
from .scratch import abandoned_in, scratch_file

SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
# Of scratch files of what is rewritten in a bundle, and of the files of prefixes and grammars: nothing that a
# user would name.
STORED = r"(prefix-[0-9a-f]{16}\.kv|grammar-[0-9a-f]{16}\.dfa)"
LEFT_OVER = re.compile(rf"\.(manifest\.(json|sha256)|{STORED})\.[0-9a-f]{{16}}|{STORED}")
SCRATCH_STAMP = r"\.[0-9a-f]{32}\.json" + SCRATCH_FILE
STAMPS, STAMP_LIMIT, MOST_STAMPS = "verified", 1_000_000, 256
TICK = 0.012  # seconds: the longest of Linux's, and some more
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


def read_small(path: Path, limit: int, *, links: bool = False) -> bytes:
    """At most `limit` bytes of a file, and one more if it is longer.

    Raises OSError for what is not a plain file, links included unless `links` may be.
    """
    with _opened(path, 0 if links else NO_LINK) as file:
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
    file = os.open(path, PLAIN | flags)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield file
    finally:
        os.close(file)


def write_whole(path: Path, content: bytes) -> None:
    """Put `content` in place of a file, whole or not at all, and on the disk before anything that follows.

    What a writer of it that was killed left goes.
    """
    with scratch_file(path) as (scratch, file):
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        scratch.replace(path)


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
    end = time.monotonic() + wait
    while True:
        try:
            handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise BundleError(f"{directory}: cannot be opened ({error.strerror})") from error
        try:
            while (got := _try_lock(handle)) is False:
                if time.monotonic() > end:
                    raise BundleError(
                        f"{directory}: another program has been writing to it for {wait:.0f} s; try again"
                    )
                time.sleep(0.01)
            if got and not _is_still(directory, handle):
                continue  # whoever had the lock put another directory in its place
            yield got is True
            return
        finally:
            os.close(handle)


def _is_still(directory: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(directory), os.fstat(handle))
    except OSError:
        return False


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
    held: Held,
    entries: Iterable[FileEntry],
    graphs: Collection[str] = (),
    *,
    full: bool = False,
    safe: bool = False,
) -> None:
    """Check presence, links, sizes and hashes of all files; raises one BundleError that lists everything
    wrong. `held` knows their states afterwards.

    The external data of `graphs` (ONNX files) must be among the files. A file that was found good and whose
    stamp (size, times and inode) is that of then is not looked into again, unless `full`. In `safe` mode
    everything is, nothing is remembered, and graphs have no loops, branches and functions.
    """
    entries, directory = list(entries), held.directory
    names = {entry.path for entry in entries}
    place = None if safe else _stamp_file(directory)
    stamps = {} if full or place is None else _read_stamps(place)
    problems, seen = [], {}
    for entry in entries:
        try:
            seen[entry.path], held.states[entry.path] = _check(
                held.place, entry, stamps, names if entry.path in graphs else None, safe=safe
            )
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
    directory: Path,
    entry: FileEntry,
    stamps: dict[str, list[object]],
    names: Collection[str] | None,
    *,
    safe: bool,
) -> tuple[list[object], State]:
    """The stamp and the state of a good file; raises ValueError or OSError for a bad one.

    `names`: what a graph may refer to.
    """
    path = directory / entry.path
    # realpath, because Path.resolve raises RuntimeError for links in a circle.
    if path.is_symlink() and Path(os.path.realpath(directory)) not in Path(os.path.realpath(path)).parents:
        raise ValueError("a link that leads out of the bundle")
    if not path.is_file():
        raise ValueError("missing")
    with _opened(path) as file:
        state = State.of(os.fstat(file))
        stamp = [entry.sha256, *state]
        if state.size != entry.size:
            raise ValueError(f"{state.size} bytes, the manifest says {entry.size}")
        if stamps.get(entry.path) == stamp:
            return stamp, state
        _settle(state)
        with os.fdopen(os.dup(file), "rb") as content:
            if sha256_of(content) != entry.sha256:
                raise ValueError("its content does not match the manifest's sha256")
        if names is not None:
            _check_graph(file, names, safe=safe)
        if State.of(os.fstat(file)) != state:
            raise ValueError("was written to while it was read")
    return stamp, state


def _settle(state: State) -> None:
    """Wait until a write that comes from now on has another time than the last one: a file system's clock
    stands still for a tick.
    """
    age = time.time() - max(state.modified, state.changed) / 1e9
    if 0 <= age < TICK:
        time.sleep(TICK - age)


def _check_graph(graph: int, names: Collection[str], *, safe: bool) -> None:
    found = contents(graph)
    for name in sorted(found.names):
        if name not in names:
            raise ValueError(f"the graph takes data from {name[:80]!r}, which `files` does not list")
    if safe and found.is_nested:
        raise ValueError(f"the graph has loops, branches or functions, which safe mode refuses; {REMEDY}")


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
        for path in abandoned_in(file.parent, SCRATCH_STAMP):  # of a bundle that may never be opened again
            path.unlink(missing_ok=True)
    except OSError:
        pass  # without a place for it every start hashes all files
