"""Replacing a directory as a whole: fill a sibling, then rename it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CURRENT_DIRECTORY, EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield the empty directory `.NAME.partial/new` beside `target`. It replaces `target` on success and is
    removed on any error. A second writer of the same target waits. Files of a killed writer are removed.

    Raises OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    outer, lock = _locked(target.with_name(f".{target.name}.partial"))
    try:
        for path in outer.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        scratch = outer / "new"
        scratch.mkdir()
        yield scratch
        _put(scratch, target)
    finally:
        shutil.rmtree(outer, ignore_errors=True)  # after an exchange it holds the old directory
        os.close(lock)


def _locked(directory: Path) -> tuple[Path, int]:
    """Create and lock `directory`. It keeps its name until the lock is released, and is removed by then."""
    while True:
        with suppress(FileExistsError):
            os.mkdir(directory)
        with suppress(FileNotFoundError):  # the last writer has removed it meanwhile
            handle = os.open(directory, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(directory), os.fstat(handle)):
                    return directory, handle
            os.close(handle)


def _put(scratch: Path, target: Path) -> None:
    if not target.exists():
        os.rename(scratch, target)
    elif not _exchanged(scratch, target):
        old = target.with_name(f".{target.name}.old")
        os.rename(target, old)
        try:
            os.rename(scratch, target)
        except OSError:
            os.rename(old, target)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two directories in one step. False if the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    current = ctypes.c_int(CURRENT_DIRECTORY)
    if not renameat2(current, os.fsencode(one), current, os.fsencode(other), ctypes.c_uint(EXCHANGE)):
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(other))


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy if the file system has no links."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)
