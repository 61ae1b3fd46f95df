"""Prefixes of a bundle: the layout of their files, and how they come into the store of a session that is
opened, mapped and read from disk when they are first used. Knows no text and no prompts.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .bundle.held import Watched
from .bundle.manifest import ModelInfo, Variant
from .bundle.open import Bundle
from .bundle.prefixes import is_for, renewal, staleness
from .bundle.stored import ID_SIZE, StoredPrefix, file_size, ids_size
from .decode.prefix import Prefixes, Stored
from .device.kv import KV_TYPES
from .errors import BundleError, MarsWarning

if TYPE_CHECKING:
    from .decode.backend import Cache

ID_TYPE = np.dtype("<u4")


def written(ids: Sequence[int], arrays: Sequence[np.ndarray], kv_dtype: str) -> tuple[str, bytes]:
    """Name and content of the file; `arrays`: [kv_heads, length, head_dim], of each layer keys and values."""
    head = np.asarray(ids, ID_TYPE).tobytes()
    parts = [head, bytes(ids_size(len(ids)) - len(head))]
    parts += [np.ascontiguousarray(array, KV_TYPES[kv_dtype]).tobytes() for array in arrays]
    data = b"".join(parts)
    return f"prefix-{hashlib.sha256(data).hexdigest()[:16]}.kv", data


class Mapped(Stored):
    """Entries in a file of the bundle, which may be written to meanwhile."""

    __slots__ = ("_watched",)
    _watched: Watched

    def __init__(self, data: list[np.ndarray], length: int, watched: Watched) -> None:
        super().__init__(data, length)
        object.__setattr__(self, "_watched", watched)

    def brought(self, cache: Cache) -> Any:
        self._watched.check()
        return super().brought(cache)


def read(directory: Path, prefix: StoredPrefix, model: ModelInfo) -> tuple[list[int], list[np.ndarray]]:
    """The ids, and the entries of each KV tensor: mapped, and not read before somebody wants them.

    Raises BundleError for a file of another size, and for ids outside the vocabulary.
    """
    file = directory / prefix.file
    try:
        whole = np.memmap(file, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise BundleError(f"{file}: cannot be mapped ({error})") from error
    if len(whole) != file_size(model.entry_bytes(prefix.kv_dtype), prefix.length):
        raise BundleError(f"{file}: {len(whole)} bytes are not {prefix.length} tokens of this model")
    ids = whole[: ID_SIZE * prefix.length].view(ID_TYPE)
    if ids.max() >= model.vocab_size:
        raise BundleError(f"{file}: token id {ids.max()} is outside the vocabulary of {model.vocab_size}")
    shape = (2 * model.num_layers, model.num_kv_heads, prefix.length, model.head_dim)
    entries = whole[ids_size(prefix.length) :].view(KV_TYPES[prefix.kv_dtype]).reshape(shape)
    return ids.tolist(), [np.asarray(tensor) for tensor in entries]


def adopt(bundle: Bundle, variant: Variant, device: str, store: Prefixes) -> None:
    """Put what was made for `variant` on `device` into the store; what is stale is left out, with one
    warning that names the commands.
    """
    manifest, stale = bundle.manifest, []
    for prefix in manifest.prefixes:
        if not is_for(prefix, variant, device):
            continue
        if reasons := staleness(manifest, variant, prefix):
            command = renewal(bundle.path, prefix, len(manifest.variants))
            stale.append(f"prefix `{prefix.name}` ({'; '.join(reasons)}):\n  {command}")
        # Where entries depend on the step they belong to pieces of one size, elsewhere to none.
        elif (prefix.piece is None) == (store.firm_slots is not None):
            try:
                watched = Watched(bundle.held, [prefix.file])
                ids, arrays = read(bundle.place("."), prefix, manifest.model)
            except BundleError as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    continue  # it was taken out of the bundle since that was opened
                raise
            store.adopt(("", prefix.piece or 1), ids, Mapped(arrays, prefix.length, watched))
    if stale:
        text = "\n".join(stale)
        warnings.warn(f"{bundle.path}: stale and not used, make it again: {text}", MarsWarning, stacklevel=3)
