"""The file of one prefix cache entry: arrays in NumPy's .npz, whose parts have checksums."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..bundle.files import NO_LINK, opened
from ..bundle.manifest import ModelInfo
from ..decode.backend import Backend
from ..decode.prefix import PrefixCache, PrefixEntry, Saved
from ..device.kv import KV_TYPES

VERSION = 3  # entries of version 2 may be those of other requests (SECURITY.md)
NAME = re.compile(
    r"prefix-[0-9a-f]{16}-[0-9a-f]{32}\.npz(\.[0-9a-f]{16})?"
)  # with an end, while it is written


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
    def of(cls, fingerprint: str, model: ModelInfo, kv_dtype: str, backend: Backend) -> PrefixFormat:
        shape = (len(model.kv_suffixes), model.num_kv_heads, model.entry_width(kv_dtype))
        return cls(fingerprint, shape, KV_TYPES[kv_dtype], backend)

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
