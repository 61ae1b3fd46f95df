"""The directory of a bundle from when it was verified to when its files are used: the same ones, by device,
inode, size and times. Reads no content.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..errors import BundleError

OPENED = Path("/proc/self/fd")  # Linux's names of what this process has opened
# A pipe in a file's place must not stop us.
PLAIN = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


class State(NamedTuple):
    """What tells one file, and one state of it, from another. Times in nanoseconds."""

    size: int
    modified: int
    changed: int
    inode: int
    device: int

    @classmethod
    def of(cls, stat: os.stat_result) -> State:
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev)


class Held:
    """A directory that stays open. `place` leads to it, also after it was renamed, exchanged or moved away;
    where the system has no such names it is the directory's own.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = self.place = directory
        self._identity: tuple[int, int] | None = None
        self.states: dict[str, State] = {}
        """Of each file as it was verified."""
        handle = None
        with suppress(OSError, AttributeError):  # no such directory: whoever reads in it says so
            handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if handle is None:
            return
        weakref.finalize(self, os.close, handle)
        state = os.fstat(handle)
        self._identity = state.st_dev, state.st_ino
        with suppress(OSError):
            if os.path.samestat(os.stat(OPENED / str(handle)), state):
                self.place = OPENED / str(handle)

    def is_same(self, other: Held) -> bool:
        """Whether it is the same directory, by whatever name."""
        return self._identity == other._identity

    def changed(self) -> list[str]:
        """Names of files that are no longer those that were verified, or no longer as they were then."""
        return [name for name, state in self.states.items() if self._now(name) != state]

    def _now(self, name: str) -> State | None:
        with suppress(OSError):
            return State.of(os.stat(self.place / name))
        return None


class Watched:
    """Files that a session has mapped. One that is cut short takes the process down, one that is written over
    gives wrong answers: `check` says so before, where it was done before.
    """

    def __init__(self, held: Held | None, names: Iterable[str]) -> None:
        self._files: list[tuple[Path, int, int, int]] = []  # what is shown, handle, size, time of change
        if held is None:
            return
        for name in names:
            with suppress(OSError):  # whoever maps it says so
                handle = os.open(held.place / name, PLAIN)
                weakref.finalize(self, os.close, handle)
                state = os.fstat(handle)
                self._files.append((held.directory / name, handle, state.st_size, state.st_mtime_ns))

    def check(self) -> None:
        """Raise BundleError when one of the files was written to since."""
        for path, handle, size, modified in self._files:
            state = os.fstat(handle)
            if state.st_size != size or state.st_mtime_ns != modified:
                raise BundleError(
                    f"{path}: was written to while it is in use; open the bundle again (a bundle is replaced"
                    " by renaming, never written over)"
                )
