"""Reads the safetensors files of a checkpoint, one tensor at a time."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ...runtime.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
TEXT_LIMIT = 128 << 20  # bytes; a tokenizer of 256,000 tokens has 35 MB
MAX_LIST = 12  # problems of one kind in a message
MAX_MESSAGE = 300  # characters of another library's error
MAX_NAME = 255  # bytes of a file name
MAX_VALUE = 80  # characters of a file's value in a message
DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class Tensors(Protocol):
    """Named weights of a model. `shapes` reads no weight data; `read` returns an array as it is stored."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> np.ndarray: ...


Entry = tuple[Path, np.dtype, tuple[int, ...], int]
"""The location of a stored tensor: file, type, shape, and offset in bytes."""


class StoredTensors:
    """Tensors of safetensors files, whose data is mapped, not copied."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: shape for name, (_, _, shape, _) in self._entries.items()}

    def read(self, name: str) -> np.ndarray:
        path, dtype, shape, offset = self._entries[name]
        if not shape:
            return np.zeros((), dtype)
        # Each tensor has its own map, so that dropping the array frees its memory.
        return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape)


class TextTensors:
    """The tensors of a multimodal checkpoint's text model, by the names that it has alone: without the vision
    tower, and without the MTP layer unless it is wanted.
    """

    def __init__(self, stored: Tensors, mtp: bool) -> None:
        self._stored = stored
        self._names = {
            name.replace("model.language_model.", "model.", 1): name
            for name in stored.shapes
            if not name.startswith("model.visual.") and (mtp or not name.startswith("mtp."))
        }

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        stored = self._stored.shapes
        return {name: stored[source] for name, source in self._names.items()}

    def read(self, name: str) -> np.ndarray:
        return self._stored.read(self._names[name])


def open_tensors(directory: Path, name: object = None) -> Tensors:
    """Open what transformers reads: the file or index that config.json names (`transformers_weights`), else
    `model.safetensors`, else the shards that `model.safetensors.index.json` lists.

    Raises CheckpointError for a directory without safetensors or with pickle files only, a missing shard, an
    index that names tensors its shards lack, and a truncated file.
    """
    if name is not None and name != Path(str(name)).name:
        raise CheckpointError(f"config.json: `transformers_weights` must be a file name, not {shown(name)}")
    names = (SINGLE_FILE, INDEX_FILE) if name is None else (str(name),)
    path = next((directory / each for each in names if (directory / each).is_file()), None)
    if path is not None:
        return _open_sharded(path) if path.suffix == ".json" else StoredTensors(read_header(path))
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{directory}: only pickle weights ({', '.join(pickles[:3])}), which can run code when they are"
            " opened; save the model again with `model.save_pretrained(path, safe_serialization=True)`"
        )
    raise CheckpointError(
        f"{directory}: no weights: there is no {' or '.join(names)}; was the download complete?"
    )


def _open_sharded(path: Path) -> Tensors:
    directory, index = path.parent, read_json(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{path}: no `weight_map`; download the file again")
    names = sorted(set(weight_map.values()))
    if unsafe := [shown(n) for n in names if Path(n).name != n or len(n.encode()) > MAX_NAME]:
        raise CheckpointError(f"{path}: shard names must be plain file names, not {first_of(unsafe)}")
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise CheckpointError(
            f"{directory}: {len(missing)} of {len(names)} shards of {path.name} are missing:"
            f" {first_of(missing)}; download them again, or remove the index if it is not this model's"
        )
    shards = {name: read_header(directory / name) for name in names}
    absent = [f"{tensor} ({shard})" for tensor, shard in weight_map.items() if tensor not in shards[shard]]
    if absent:
        raise CheckpointError(
            f"{directory}: the index names tensors that their shards lack: {first_of(absent)}"
        )
    return StoredTensors({tensor: shards[shard][tensor] for tensor, shard in weight_map.items()})


def read_text(path: Path) -> str:
    """The text of a file of at most TEXT_LIMIT bytes. Raises OSError or ValueError."""
    check_size(path)
    return path.read_text(encoding="utf-8")


def check_size(path: Path) -> None:
    """Raise ValueError for a file of more than TEXT_LIMIT bytes."""
    if path.stat().st_size > TEXT_LIMIT:
        raise ValueError(f"more than {TEXT_LIMIT} bytes")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value = json.loads(read_text(path))
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # a lone surrogate could not be encoded later
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is expected, not {type(value).__name__}")
    return value


@contextmanager
def reading(where: Path | str) -> Iterator[None]:
    """Turn whatever strange content makes a reader raise into one CheckpointError that names the file."""
    try:
        yield
    except (CheckpointError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # Rust libraries panic with BaseException
        kind, words = type(error).__name__, " ".join(str(error)[:MAX_MESSAGE].split())
        raise CheckpointError(
            f"{where}: cannot be used as it is ({kind}: {words}); correct it, or save or download it again"
        ) from error


def shown(value: object) -> str:
    """A value of a file, shortened for a message."""
    text = repr(value)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}..."


def first_of(problems: Sequence[str]) -> str:
    """The first problems of one kind, and the number of further ones."""
    more = len(problems) - MAX_LIST
    return ", ".join([*problems[:MAX_LIST], *([f"... and {more} more"] if more > 0 else [])])


def same_numbers(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two tables hold the same numbers, possibly in different types."""
    return first.shape == second.shape and all(
        bool((np.asarray(a, np.float32) == np.asarray(b, np.float32)).all())
        for a, b in zip(chunks(first), chunks(second), strict=True)
    )


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file. Raises CheckpointError for a truncated file and other types."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):  # checks the header, and the length of the file against it
            pass
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(start - 8))
    except (OSError, SafetensorError, ValueError) as error:
        words = str(error)[:MAX_VALUE]
        raise CheckpointError(
            f"{path}: truncated or not a safetensors file ({words}); download it again"
        ) from error
    header.pop("__metadata__", None)
    entries = {}
    for name, entry in header.items():
        kind = entry["dtype"]
        if kind not in DTYPES:
            raise CheckpointError(
                f"{path}: tensor `{name}` has dtype {kind}; known are {', '.join(DTYPES)}; export from the"
                " unquantized checkpoint"
            )
        entries[name] = path, DTYPES[kind], tuple(entry["shape"]), start + entry["data_offsets"][0]
    return entries


def chunks(array: np.ndarray, limit: int = 1 << 24) -> Iterator[np.ndarray]:
    """Split `array` along its first axis into views of about `limit` elements, to keep temporaries small."""
    array = np.atleast_1d(array)
    rows = max(1, limit // max(1, int(np.prod(array.shape[1:], dtype=np.int64))))
    for start in range(0, array.shape[0], rows):
        yield array[start : start + rows]


def as_torch(array: np.ndarray) -> Any:
    """The same memory as a tensor; torch does not know numpy's bfloat16."""
    # imported here, because adding an engine to a bundle needs these modules but not torch
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a mapped file is read only
        if array.dtype == DTYPES["BF16"]:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)


def largest(array: np.ndarray) -> float:
    """The largest magnitude; NaN or Inf if the array holds one."""
    low, high = as_torch(array).aminmax() if array.size else (0, 0)
    return max(abs(float(low)), abs(float(high)))


def check_finite(name: str, array: np.ndarray) -> None:
    """Raise CheckpointError if `array` holds NaN or Inf."""
    if not math.isfinite(largest(array)):
        raise CheckpointError(
            f"tensor `{name}` holds NaN or Inf values; the checkpoint is broken: train or download it again"
        )
