"""A prefix cache with a directory, without a model: each id is its own entry."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mars_export.runtime.decode.prefix import PrefixCache, Saved
from mars_export.runtime.session.prefix_dir import PrefixDir, PrefixFormat
from support.prefixes import PLENTY

SHAPE = (2, 1, 4)


class HostBackend:
    """Copies of entries are the arrays themselves."""

    def new_cache(self, _: int) -> HostBackend:
        return self

    def download(self, saved: Any) -> Any:
        return saved

    upload = download


def form(fingerprint: str = "f" * 32, dtype: Any = np.dtype("<f4")) -> PrefixFormat:  # noqa: B008
    return PrefixFormat(fingerprint, SHAPE, dtype, HostBackend())  # type: ignore[arg-type]


def tensors(ids: Sequence[int], dtype: Any) -> list[np.ndarray]:
    count, heads, dim = SHAPE
    return [np.broadcast_to(np.array(ids, dtype)[:, None], (heads, len(ids), dim)).copy()] * count


def stored(all_ids: Sequence[Sequence[int]]) -> PrefixCache:
    store = PrefixCache(PLENTY, 1)
    for ids in all_ids:
        put(store, ids)
    return store


def put(
    store: PrefixCache, ids: Sequence[int], salt: str = "", *, fixed: bool = False, dtype: Any = np.float32
) -> None:
    data = tensors(ids, dtype)
    num_bytes = sum(tensor.nbytes for tensor in data)
    store.save((salt, 1), ids, num_bytes, lambda: Saved(data, len(ids)), fixed=fixed)


class Twin:
    """One of several processes, or one after a restart."""

    def __init__(
        self,
        path: Path,
        budget: int = PLENTY,
        *,
        memory: int = PLENTY,
        fingerprint: str = "f" * 32,
        dtype: Any = np.dtype("<f4"),  # noqa: B008
    ) -> None:
        self.store, self._dtype = PrefixCache(memory, 1), dtype
        self.dir = PrefixDir(path, budget, form(fingerprint, dtype), self.store)

    def save(self, ids: Sequence[int], salt: str = "", *, fixed: bool = False) -> None:
        """Save an entry, and wait for its file."""
        put(self.store, ids, salt, fixed=fixed, dtype=self._dtype)
        self.dir.wait()

    def length(self, ids: Sequence[int], salt: str = "") -> int:
        """How many of the ids are found, with the right entries."""
        match = self.store.match((salt, 1), ids)
        if match is None:
            return 0
        saved, length = match
        for had, wanted in zip(saved.data, tensors(ids, self._dtype), strict=True):
            assert np.array_equal(had[:, :length], wanted[:, :length])
        return length
