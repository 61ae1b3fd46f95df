"""Scratch files and directories beside what they become, and what killed writers left of them.

Whoever writes one keeps it locked, so one that nobody has locked is a dead writer's; where a file system
knows no locks nothing is taken for one. Knows no bundles.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PARTIAL = ".partial"
FILE, DIRECTORY = r"\.[0-9a-f]{16}", rf"-[a-z0-9_]{{8}}{re.escape(PARTIAL)}"  # ends of names
LOOK = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)


@contextmanager
def scratch_file(target: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file beside `target` and its name, which are gone afterwards unless it was renamed. Dead writers'
    go first.

    It has a name that nobody can foresee, and is never one that is there: no planted link is followed. Raises
    OSError.
    """
    with suppress(OSError):
        for left in abandoned(target, FILE):
            left.unlink()
    while True:
        path = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        with os.fdopen(os.open(path, CREATE, 0o666), "wb") as file:
            if _is_ours(file.fileno(), path):
                try:
                    yield path, file
                finally:
                    path.unlink(missing_ok=True)
                return


class ScratchDirectory:
    """A new directory beside `target`, for its owner only. Dead writers' go first. Raises OSError."""

    def __init__(self, target: Path) -> None:
        sweep(target)
        while True:
            made = tempfile.mkdtemp(prefix=f".{target.name}-", suffix=PARTIAL, dir=target.parent)
            self.path = Path(made)
            with suppress(BlockingIOError):  # another start sweeps it away
                self._lock = lock(self.path)
                if self._lock is None or self.path.is_dir():
                    return
                os.close(self._lock)

    def remove(self) -> None:
        """Take away what is still there under its name."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def sweep(target: Path) -> None:
    """Remove the directories that dead writers left beside `target`."""
    with suppress(OSError):
        for left in abandoned(target, DIRECTORY):
            shutil.rmtree(left, ignore_errors=True)


def abandoned(target: Path, end: str) -> Iterator[Path]:
    """What lies beside `target` under its hidden name with such an end (an expression) and is not locked.

    Each is locked while it is looked at.
    """
    yield from abandoned_in(target.parent, re.escape(f".{target.name}") + end)


def abandoned_in(directory: Path, name: str) -> Iterator[Path]:
    """The same of all of a directory whose names match the expression."""
    ours = re.compile(name)
    for path in sorted(path for path in directory.iterdir() if ours.fullmatch(path.name)):
        try:
            handle = lock(path)
        except BlockingIOError:
            continue
        if handle is not None:
            try:
                yield path
            finally:
                os.close(handle)


def lock(path: Path) -> int | None:
    """A lock of a file or directory, None where there are no locks and for anything else.

    Raises BlockingIOError when somebody else has it.
    """
    if fcntl is None:
        return None
    handle = None
    try:
        handle = os.open(path, LOOK)
        mode = os.fstat(handle).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise OSError
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if handle is not None:
            os.close(handle)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return handle


def _is_ours(file: int, path: Path) -> bool:
    """Whether a file that was just made is locked now, or cannot be, and was not swept away meanwhile."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
    return path.exists()
