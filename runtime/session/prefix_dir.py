"""A directory of prefix cache entries, which outlive the process.

Processes share it without locks: a file is written under another name, then renamed, and is checked when it
is read.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import machine
from ..decode.prefix import PrefixCache, PrefixEntry
from ..device.cuda import memory_free
from ..device.name import DeviceName
from ..errors import SessionError
from .prefix_file import NAME, PrefixFormat

CACHE_SHARE, MAX_CACHE = 16, 1 << 30  # the prefix cache takes 1 / 16 of the free memory, at most 1 GiB
CACHE_UNKNOWN = 256 << 20  # its bytes if the free memory is unknown
PREFIX_BYTES = 4 << 30  # of a directory by default
DROPPED: Any = object()
LOG = logging.getLogger("mars_export")


class PrefixDir:
    """Files of at most `budget` bytes, of any number of models; the least recently used are removed first.

    Opening it adds the latest used entries to `store`, as many as fit, removes damaged ones, and keeps the
    files those of `store`. A thread writes; the process waits for it at its end.
    """

    def __init__(self, path: str | Path, budget: int, form: PrefixFormat, store: PrefixCache) -> None:
        self._path, self._budget, self._form = Path(path).expanduser(), budget, form
        self._pending: dict[str, PrefixEntry | None] = {}  # by file; None removes it
        self._writer = ThreadPoolExecutor(1, "mars-prefixes")
        if store.budget == 0:
            raise SessionError(f"the prefix directory {path} needs a prefix cache: cache_bytes is 0")
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            files = self._files()
        except OSError as error:
            raise SessionError(
                f"{path}: cannot be used as a prefix directory ({error.strerror}); choose another one"
            ) from error
        latest, size = [], 0
        for file, state in reversed([pair for pair in files if form.is_own(pair[0].name)]):
            size += state.st_size
            if size <= store.budget:
                latest.append(file)
        for file in reversed(latest):
            self._load(file, store)
        if num_entries := store.stats.entries:
            LOG.info("prefix cache: %d entries loaded, %d bytes", num_entries, store.stats.num_bytes)
        store.copies = self

    def used(self, entry: PrefixEntry) -> None:
        self._put(self._form.name(entry), entry)

    def dropped(self, entry: PrefixEntry, *, replaced: bool) -> None:
        name = self._form.name(entry)
        if replaced:
            self._put(name, None)
        else:
            self._pending.pop(name, None)

    def wait(self) -> None:
        """Wait until everything is written."""
        self._writer.submit(lambda: None).result()

    def _load(self, file: Path, store: PrefixCache) -> None:
        try:
            self._form.load(file, store)
        except FileNotFoundError:
            pass
        except Exception as error:  # what zip files and arrays raise
            is_damage = not isinstance(error, OSError | MemoryError)
            if (
                not is_damage and getattr(error, "errno", None) != errno.EINVAL
            ):  # EINVAL: a wrong offset in it
                LOG.warning("%s: the prefix cache entry cannot be read now (%s)", file, error)
                return
            LOG.warning("%s: not a valid prefix cache entry (%s)", file, error)
            with suppress(OSError):
                file.unlink()

    def _put(self, name: str, entry: PrefixEntry | None) -> None:
        self._pending[name] = entry
        with suppress(RuntimeError):  # the interpreter ends
            self._writer.submit(self._write, name)

    def _write(self, name: str) -> None:
        try:
            if (entry := self._pending.pop(name, DROPPED)) is not DROPPED:
                self._update(self._path / name, entry)
        except Exception as error:  # a full disk, no memory; answers do not depend on the file
            LOG.warning("a prefix cache entry was not written: %s", error)

    def _update(self, path: Path, entry: PrefixEntry | None) -> None:
        if entry is None:
            path.unlink(missing_ok=True)
        elif path.exists():
            with suppress(FileNotFoundError):  # another process has just removed it
                _touch(path)
        elif (size := self._form.size(entry)) <= self._budget:
            self._make_room(size)
            scratch = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
            try:
                with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    self._form.write(entry, file)
                with suppress(FileNotFoundError):  # the same
                    _touch(scratch)
                    scratch.replace(path)
            finally:
                scratch.unlink(missing_ok=True)

    def _make_room(self, num_bytes: int) -> None:
        files = self._files()
        over = sum(state.st_size for _, state in files) + num_bytes - self._budget
        for file, state in files:
            if over <= 0:
                return
            file.unlink(missing_ok=True)
            over -= state.st_size

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        """The entries of all models, the least recently used first, with what killed processes left."""
        files = []
        for file in self._path.iterdir():
            with suppress(FileNotFoundError):  # another process has removed it
                if NAME.fullmatch(file.name):
                    files.append((file, file.lstat()))
        return sorted(files, key=lambda pair: pair[1].st_mtime_ns)


def _touch(path: Path) -> None:
    """Note the time of use, more exactly than the file system does by itself."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


def cache_share(device: DeviceName) -> int:
    """Bytes of the prefix cache by default: a small part of the free memory."""
    free = machine.available() if device.kind == "cpu" else memory_free(device.ordinal)
    return CACHE_UNKNOWN if free is None else max(0, min(free // CACHE_SHARE, MAX_CACHE))
