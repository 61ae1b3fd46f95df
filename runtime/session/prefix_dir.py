"""A directory of prefix cache entries, which outlive the process. A file has one entry: arrays in NumPy's
.npz, whose parts have checksums.

Processes share it without locks: a file is written under another name, then renamed, and is checked when it
is read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import platform
import re
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .. import machine
from ..bundle.files import NO_LINK, opened
from ..bundle.manifest import ModelInfo, Variant
from ..bundle.open import Bundle
from ..bundle.profiles import sha256_of
from ..decode.backend import Backend
from ..decode.prefix import PrefixCache, PrefixEntry, Saved
from ..device.cuda import memory_free
from ..device.kv import KV_TYPES
from ..device.name import DeviceName
from ..device.ort.library import version_and_devices
from ..errors import SessionError

CACHE_SHARE, MAX_CACHE = 16, 1 << 30  # the prefix cache takes 1 / 16 of the free memory, at most 1 GiB
CACHE_UNKNOWN = 256 << 20  # its bytes if the free memory is unknown
PREFIX_BYTES = 4 << 30  # of a directory by default
DROPPED: Any = object()
LOG = logging.getLogger("mars_export")
VERSION = 3  # entries of version 2 may be those of other requests (SECURITY.md)
NAME = re.compile(r"prefix-[0-9a-f]{16}-[0-9a-f]{32}\.npz(\.[0-9a-f]{16})?")  # an end: while it is written


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
            what = f"the prefix directory {path} needs a prefix cache: cache_bytes is 0"
            raise SessionError(what, field="cache_bytes")
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
            if not is_damage and getattr(error, "errno", None) != errno.EINVAL:  # of a wrong offset in it
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


@dataclass(frozen=True, slots=True)
class PrefixFormat:
    """How the entries of one variant on one kind of machine are written.

    fingerprint: what the bits of the entries depend on
    shape: number of KV tensors, kv_heads, numbers of an entry
    backend: copies entries from and to the device
    """

    fingerprint: str
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    backend: Backend

    @classmethod
    def of(cls, fingerprint: str, model: ModelInfo, variant: Variant, backend: Backend) -> PrefixFormat:
        shape = (len(model.kv_suffixes), *model.entry_shape(variant.kv_dtype, variant.kv_layout))
        return cls(fingerprint, shape, KV_TYPES[variant.kv_dtype], backend)

    def name(self, entry: PrefixEntry) -> str:
        """The file's name, the same for equal entries."""
        group = json.dumps(entry.group).encode("ascii")
        of_entry = hashlib.sha256(group + entry.key).hexdigest()
        return f"prefix-{self.fingerprint[:16]}-{of_entry[:32]}.npz"

    def is_own(self, name: str) -> bool:
        """Whether a file with this name has an entry that a session with this format can use."""
        match = NAME.fullmatch(name)
        return match is not None and not match[1] and name.startswith(f"prefix-{self.fingerprint[:16]}-")

    def size(self, entry: PrefixEntry) -> int:
        """Bytes of the entry's tensors, a little less than those of its file."""
        return entry.saved.length * self._token_bytes

    @property
    def _token_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.shape[2] * self.dtype.itemsize

    def write(self, entry: PrefixEntry, file: BinaryIO) -> None:
        header = {
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "group": entry.group,
            "fixed": entry.fixed,
        }
        text = np.frombuffer(json.dumps(header).encode("ascii"), np.uint8)
        tensors = self.backend.new_cache(1).download(entry.saved.data)
        np.savez(file, *tensors, header=text, ids=np.frombuffer(entry.key, ">u4"))

    def load(self, path: Path, store: PrefixCache) -> None:
        """Add the entry of a file to `store`. Raises an Exception of any kind if it has no valid one."""
        count, heads, dim = self.shape
        with opened(path, NO_LINK) as file, np.load(file, allow_pickle=False) as arrays:
            header = json.loads(arrays["header"].tobytes())
            if (header["version"], header["fingerprint"]) != (VERSION, self.fingerprint):
                raise ValueError("entries of another version, model or machine")
            ids = arrays["ids"].tolist()
            tensors = [arrays[f"arr_{i}"] for i in range(count)]
        if any((t.shape, t.dtype) != ((heads, len(ids), dim), self.dtype) for t in tensors):
            raise ValueError("tensors of another shape")
        salt, block_size = header["group"]

        def copy() -> Saved:
            return Saved(self.backend.new_cache(1).upload(tensors), len(ids))

        num_bytes = len(ids) * self._token_bytes
        store.save((str(salt), int(block_size)), ids, num_bytes, copy, fixed=bool(header["fixed"]))


def fingerprint(bundle: Bundle, variant: Variant, device: str, options: Mapping[str, str] | None) -> str:
    """32 hex digits, the same for sessions whose steps give the same bits."""
    manifest = bundle.manifest
    key = [
        sha256_of(manifest, variant.file),
        sha256_of(manifest, variant.weights),
        variant.precision,
        variant.accuracy_level,
        variant.kv_dtype,
        variant.backend,
        variant.engine.version if variant.engine is not None else version_and_devices(),
        device,
        platform.machine(),
        machine.processor(),
        sorted(machine.cpu_flags()),
        machine.gpus() if device.startswith("cuda") else [],
        sorted((options or {}).items()),
    ]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
