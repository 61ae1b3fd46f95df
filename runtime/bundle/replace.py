"""Replacing a directory as a whole: fill a sibling, then rename it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield the empty directory `.NAME.partial/new` beside `target`. It replaces `target` on success and is
    removed on any error. A second writer of the same target waits. Files of a killed writer are removed.

    Raises OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    outer, lock = _locked(target.with_name(f".{target.name}.partial"))
    scratch, old = outer / "new", outer / "old"
    try:
        if old.exists() and not target.exists():  # a writer was killed between its renames
            os.rename(old, target)
        for path in outer.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        scratch.mkdir()
        yield scratch
        if target.exists():
            os.rename(target, old)
        try:
            os.rename(scratch, target)
        except OSError:
            if old.exists():
                os.rename(old, target)
            raise
    finally:
        shutil.rmtree(outer, ignore_errors=True)
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


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy if the file system has no links."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)
