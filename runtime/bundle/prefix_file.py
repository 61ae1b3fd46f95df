"""The file of a stored prefix: token ids, then their KV entries (docs/format.md). Knows no session."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BundleError
from .manifest import ModelInfo
from .stored import ID_SIZE, StoredPrefix, file_size, ids_size

ID_TYPE = np.dtype("<u4")
# numpy has no bfloat16, and nobody computes with these bits.
KV_TYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}


def written(ids: Sequence[int], arrays: Sequence[np.ndarray], kv_dtype: str) -> tuple[str, bytes]:
    """Name and content of the file; `arrays`: [kv_heads, length, head_dim], of each layer keys and values."""
    head = np.asarray(ids, ID_TYPE).tobytes()
    parts = [head, bytes(ids_size(len(ids)) - len(head))]
    parts += [np.ascontiguousarray(array, KV_TYPES[kv_dtype]).tobytes() for array in arrays]
    data = b"".join(parts)
    return f"prefix-{hashlib.sha256(data).hexdigest()[:16]}.kv", data


def read(directory: Path, prefix: StoredPrefix, model: ModelInfo) -> tuple[list[int], list[np.ndarray]]:
    """The ids, and the entries of each KV tensor: mapped, and not read before somebody wants them.

    Raises BundleError for a file of another size, and for ids outside the vocabulary.
    """
    file = directory / prefix.file
    try:
        whole = np.memmap(file, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise BundleError(f"{file}: cannot be mapped ({error})") from error
    if len(whole) != file_size(model, prefix.kv_dtype, prefix.length):
        raise BundleError(f"{file}: {len(whole)} bytes are not {prefix.length} tokens of this model")
    ids = whole[: ID_SIZE * prefix.length].view(ID_TYPE)
    if ids.max() >= model.vocab_size:
        raise BundleError(f"{file}: token id {ids.max()} is outside the vocabulary of {model.vocab_size}")
    shape = (2 * model.num_layers, model.num_kv_heads, prefix.length, model.head_dim)
    entries = whole[ids_size(prefix.length) :].view(KV_TYPES[prefix.kv_dtype]).reshape(shape)
    return ids.tolist(), [np.asarray(tensor) for tensor in entries]
