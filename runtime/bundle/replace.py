"""Replacing a directory as a whole: fill a sibling, then rename it."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where writers of the same target do not wait for each other
    fcntl = None  # type: ignore[assignment]

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
    except (AttributeError, OSError, TypeError):  # not Linux, or an old C library
        return False
    names = os.fsencode(first), os.fsencode(second)
    return bool(rename(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0)


@contextmanager
def _locked(directory: Path) -> Iterator[Path]:
    """Create and lock `directory`. It keeps its name until the lock is released, and is removed by then."""
    handle = _lock(directory)
    try:
        yield directory
    finally:
        if handle is not None:
            os.close(handle)


def _lock(directory: Path) -> int | None:
    while True:
        with suppress(FileExistsError):
            os.mkdir(directory)
        if fcntl is None:
            return None
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
