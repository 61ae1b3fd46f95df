"""The files of a bundle: names, sizes, hashes; writing a file, and replacing a directory, as a whole."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Annotated

from ..errors import BundleError, listed
from ..machine import cache_dir
from ..rules import matching

MANIFEST_FILE, CHECKSUM_FILE = "manifest.json", "manifest.sha256"
SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
STAMPS, STAMP_LIMIT, MAX_STAMPS = "verified", 1_000_000, 256
CHUNK = 1 << 20
# Without O_NONBLOCK, opening a named pipe waits for its writer.
PLAIN, NO_LINK = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a bundle. `path` is a plain name inside it, `size` in bytes, `sha256` in lower-case hex."""

    path: Annotated[str, matching(SAFE_NAME, "a plain file name")]
    size: int
    sha256: str


def sha256_of(file: BufferedReader) -> str:
    """The digest, in hexadecimal, of the rest of a binary file.

    `hashlib.file_digest` needs Python 3.11; JetPack 6 has 3.10.
    """
    digest, buffer = hashlib.sha256(), bytearray(CHUNK)
    view = memoryview(buffer)
    while count := file.readinto(buffer):
        digest.update(view[:count])
    return digest.hexdigest()


def describe(path: Path) -> FileEntry:
    """Measure and hash one file."""
    with path.open("rb") as file:
        digest = sha256_of(file)
    return FileEntry(path.name, path.stat().st_size, digest)


def read_small(path: Path, limit: int, *, links: bool = False) -> bytes:
    """At most `limit` bytes of a file, and one more if it is longer.

    Raises OSError for anything but a regular file, and for a link unless `links`.
    """
    with opened(path, 0 if links else NO_LINK) as file:
        return file.read(limit + 1)


@contextmanager
def opened(path: Path, flags: int = 0) -> Iterator[BufferedReader]:
    """Open a regular file for reading. Pipes and devices raise OSError."""
    with os.fdopen(os.open(path, PLAIN | flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield file


def write_whole(path: Path, content: bytes) -> None:
    """Write a new file beside `path`, then rename it. Raises OSError."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with scratch.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except FileExistsError:
        raise  # it is another's
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def verify(
    directory: Path,
    entries: Iterable[FileEntry],
    *,
    full: bool = False,
    safe: bool = False,
    name: Path | None = None,
) -> None:
    """Check that exactly `entries` and the manifest are in `directory`, with the right sizes and hashes.

    A file is hashed once. Its stamp (time, size, inode) is stored, and the file is hashed again only if the
    stamp has changed, or with `full`. In `safe` mode no stamp is read or written. `name` is the path that the
    directory will be renamed to. Raises one BundleError that lists every problem.
    """
    entries = list(entries)
    file = None if safe else _stamp_file(name or directory)
    stamps = {} if full or file is None else _read_stamps(file)
    new, problems = {}, []
    for entry in entries:
        try:
            new[entry.path] = _check(directory, entry, stamps)
        except (OSError, ValueError) as error:
            problems.append(f"{entry.path}: {error.strerror if isinstance(error, OSError) else error}")
    names = {entry.path for entry in entries} | {MANIFEST_FILE, CHECKSUM_FILE}
    problems += [
        f"{path.name[:80]}: not listed in the manifest; remove it"
        for path in sorted(directory.iterdir())
        if path.name not in names
    ]
    if problems:
        raise BundleError(
            f"{directory}: damaged or incomplete:{listed(problems)}\n  copy or export the bundle again"
        )
    if file is not None and new != stamps:
        _write_stamps(file, new)


def stamp(directory: Path, entries: Iterable[FileEntry]) -> None:
    """Store the stamps of files that are known to be good."""
    if (file := _stamp_file(directory)) is not None:
        _write_stamps(file, {e.path: _stamp(e, (directory / e.path).stat()) for e in entries})


def _check(directory: Path, entry: FileEntry, stamps: dict[str, list[object]]) -> list[object]:
    """Check one file and return its stamp. Raises ValueError or OSError."""
    path = directory / entry.path
    if not path.is_file():
        raise ValueError("missing")
    with opened(path) as file:
        state = os.fstat(file.fileno())
        if state.st_size != entry.size:
            raise ValueError(f"{state.st_size} bytes, the manifest says {entry.size}")
        if stamps.get(entry.path) != _stamp(entry, state) and sha256_of(file) != entry.sha256:
            raise ValueError("its content does not match the manifest's sha256")
    return _stamp(entry, state)


def _stamp(entry: FileEntry, state: os.stat_result) -> list[object]:
    """Hash, size, mtime, ctime, inode and device, in the form that libmars writes too."""
    return [entry.sha256, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino, state.st_dev]


def _stamp_file(directory: Path) -> Path | None:
    """Stamps are in the user's cache, not in the bundle: the origin of a bundle may be unknown."""
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
        for path in others[:-MAX_STAMPS]:
            path.unlink(missing_ok=True)
    except OSError:
        pass  # without a cache directory, each start hashes all files


AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield the empty directory `.NAME.partial/new` beside `target`. It replaces `target` on success and is
    removed on any error. A second writer of the same target waits. Files of a killed writer are removed.

    The replaced directory is removed only after the new one has taken its place.
    Raises OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(_partial(target)) as outer:
        scratch, old = outer / "new", outer / "old"
        try:
            _put_back(old, target)
            for path in outer.iterdir():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            scratch.mkdir()
            yield scratch
            if not (target.exists() and _exchange(scratch, target)):
                if target.exists():
                    os.rename(target, old)
                os.rename(scratch, target)
        finally:
            is_unfinished = old.exists() and scratch.exists()
            if is_unfinished:
                with suppress(OSError):
                    _put_back(old, target)
            if not (is_unfinished and old.exists()):
                shutil.rmtree(outer, ignore_errors=True)


def recover(target: Path) -> None:
    """Put back a directory that a killed writer had moved away; waits for a writer that still runs."""
    if target.exists() or not (_partial(target) / "old").exists():
        return
    # OSError: such as a file system that is mounted read-only
    with suppress(OSError), _locked(_partial(target)) as outer:
        _put_back(outer / "old", target)
        shutil.rmtree(outer, ignore_errors=True)


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def _put_back(old: Path, target: Path) -> None:
    if old.exists() and not target.exists():
        os.rename(old, target)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two directories in one step. False if the system or the file system cannot."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except AttributeError:  # not Linux, or an old C library
        return False
    names = os.fsencode(first), os.fsencode(second)
    return bool(rename(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0)


@contextmanager
def _locked(directory: Path) -> Iterator[Path]:
    """Create and lock `directory`. It keeps its name until the lock is released, and is removed by then."""
    try:
        handle = _lock(directory)
        try:
            yield directory
        finally:
            os.close(handle)
    except BaseException:  # a signal's exception may come right after the directory was made
        with suppress(OSError):  # not empty: of another writer, or it has the old directory
            os.rmdir(directory)
        raise


def _lock(directory: Path) -> int:
    while True:
        with suppress(FileExistsError):
            os.mkdir(directory)
        with suppress(FileNotFoundError):  # the last writer has removed it meanwhile
            handle = os.open(directory, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(directory), os.fstat(handle)):
                    return handle
            os.close(handle)


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy if the file system has no links."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)
