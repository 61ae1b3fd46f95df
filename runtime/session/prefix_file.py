"""The file of one prefix cache entry: a line of JSON, the token ids, the KV tensors, and a SHA-256."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..bundle.files import NO_LINK, opened
from ..bundle.manifest import Variant
from ..bundle.open import Bundle
from ..decode.backend import Backend
from ..decode.prefix import PrefixEntry, Prefixes, Saved
from ..device.kv import KV_TYPES
from .fingerprint import fingerprint

VERSION = 1
NAME = re.compile(
    r"prefix-[0-9a-f]{16}-[0-9a-f]{32}\.kv(\.[0-9a-f]{16})?"
)  # with an end, while it is written
MOST_HEADER = 1 << 16  # bytes


@dataclass(frozen=True, slots=True)
class PrefixFormat:
    """How the entries of one variant on one kind of machine are written.

    fingerprint: what the bits of the entries depend on
    shape: number of KV tensors, kv_heads, head_dim
    backend: copies entries from and to the device
    """

    fingerprint: str
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    backend: Backend

    @classmethod
    def of(
        cls,
        bundle: Bundle,
        variant: Variant,
        backend: Backend,
        device: str,
        options: Mapping[str, str] | None = None,
    ) -> PrefixFormat:
        model = bundle.manifest.model
        shape = (len(model.kv_suffixes), model.num_kv_heads, model.head_dim)
        bits = fingerprint(bundle, variant, device, options)
        return cls(bits, shape, KV_TYPES[variant.kv_dtype], backend)

    def name(self, entry: PrefixEntry) -> str:
        """The file's name, the same for equal entries."""
        group = json.dumps(entry.group).encode("ascii")
        of_entry = hashlib.sha256(group + entry.key).hexdigest()
        return f"prefix-{self.fingerprint[:16]}-{of_entry[:32]}.kv"

    def is_own(self, name: str) -> bool:
        """Whether a file with this name has an entry that a session with this format can use."""
        match = NAME.fullmatch(name)
        return match is not None and not match[1] and name.startswith(f"prefix-{self.fingerprint[:16]}-")

    def size(self, entry: PrefixEntry) -> int:
        """Bytes of the file."""
        return len(_header(self, entry)) + self._size_after_header(entry.saved.length)

    def parts(self, entry: PrefixEntry) -> Iterator[bytes | memoryview]:
        """The content of the file."""
        digest = hashlib.sha256()
        tensors = self.backend.new_cache(1).fetch(entry.saved.data)
        parts: list[bytes | memoryview] = [_header(self, entry), entry.key, *map(_bytes, tensors)]
        for part in parts:
            digest.update(part)
            yield part
        yield digest.digest()

    def load(self, path: Path, store: Prefixes) -> None:
        """Add the entry of a file to `store`. Raises OSError or ValueError if it has no valid one."""
        with opened(path, NO_LINK) as file:
            line = file.readline(MOST_HEADER)
            header = json.loads(line)
            if not isinstance(header, dict) or header.get("version") != VERSION:
                raise ValueError("another version")
            if header["fingerprint"] != self.fingerprint:
                raise ValueError("entries of another model or machine")
            salt, grain, length = str(header["salt"]), int(header["grain"]), int(header["length"])
            size = len(line) + self._size_after_header(length)
            if length < 1 or os.fstat(file.fileno()).st_size != size:
                raise ValueError("another size")
            key, count = file.read(4 * length), self.shape[0]
            digest = hashlib.sha256(line + key)
            tensors = [np.empty((self.shape[1], length, self.shape[2]), self.dtype) for _ in range(count)]
            for tensor in tensors:
                file.readinto(_bytes(tensor))
                digest.update(_bytes(tensor))
            if file.read() != digest.digest():
                raise ValueError("another hash")
        ids = np.frombuffer(key, ">u4").tolist()

        def copy() -> Saved:
            return Saved(self.backend.new_cache(1).bring(tensors), length)

        num_bytes = length * self._entry_bytes
        store.save((salt, grain), ids, num_bytes, copy, fixed=bool(header["fixed"]))

    @property
    def _entry_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.shape[2] * self.dtype.itemsize

    def _size_after_header(self, length: int) -> int:
        return length * (4 + self._entry_bytes) + hashlib.sha256().digest_size


def _header(form: PrefixFormat, entry: PrefixEntry) -> bytes:
    (salt, grain), length = entry.group, entry.saved.length
    header = {"version": VERSION, "fingerprint": form.fingerprint, "salt": salt, "grain": grain}
    return json.dumps(header | {"fixed": entry.fixed, "length": length}).encode("ascii") + b"\n"


def _bytes(tensor: np.ndarray) -> memoryview:
    """The memory of a contiguous array."""
    return tensor.reshape(-1).view(np.uint8).data
