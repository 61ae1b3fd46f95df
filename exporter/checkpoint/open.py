"""A MARS checkpoint, opened: normalised to a stock causal decoder, proven to be MARS, its tensors ready to stream."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...runtime.errors import CheckpointError
from . import adapter
from . import compressed as packed
from . import default as embedded
from .family import Dims, check_shapes, dims_from_config
from .tensors import Tensors, open_tensors, read_json
from .vocabulary import Vocabulary, read_vocabulary

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What the exporter needs to know. `source` and `revision` say where it came from, for the bundle's manifest."""

    source: str
    revision: str | None
    dims: Dims
    tensors: Tensors
    vocabulary: Vocabulary


def open_checkpoint(
    location: str | None,
    *,
    revision: str | None = None,
    base: str | None = None,
    mask_token: str | None = None,
) -> Checkpoint:
    """Open a Hugging Face directory, hub id, PEFT adapter directory or GGUF file; None opens the embedded default.

    No weight is read yet beyond file headers. `base` overrides the base model that an adapter names.
    Raises CheckpointError, listing all problems of one kind at once.
    """
    if location is None:
        location = str(embedded.ADAPTER)
    directory = _directory(location, revision)
    directories = [directory]
    config_of_adapter = None
    if (directory / adapter.CONFIG_FILE).is_file():
        config_of_adapter = adapter.read_adapter_config(directory)
        base = base or config_of_adapter.base
        is_default = base == embedded.BASE_NAME
        directories.append(
            embedded.base_directory() if is_default else _directory(base, config_of_adapter.revision)
        )
    config = _read_config(directories[-1])
    dims = dims_from_config(config)
    codec = packed.read_scheme(config.get("quantization_config"))
    tensors = open_tensors(directories[-1])
    if codec is not None:
        tensors = packed.unpacked(tensors, codec)
    if config_of_adapter is not None:
        tensors = adapter.MergedTensors(tensors, directory, config_of_adapter)
    check_shapes(dims, tensors.shapes)
    vocabulary = read_vocabulary(directories, config, dims.vocab_size, mask_token)
    is_ours = directory == embedded.ADAPTER
    source = embedded.NAME if is_ours else location
    pinned = embedded.adapter_digest() if is_ours else revision or _snapshot(directory)
    return Checkpoint(source, pinned, dims, tensors, vocabulary)


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory}: no config.json; is this a Hugging Face model directory?")
    return dict(read_json(path))


def _directory(location: str, revision: str | None) -> Path:
    path = Path(location).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CheckpointError(f"{location}: no such file")
        return embedded.converted(path)
    if path.exists() or path.is_absolute() or location.count("/") != 1 or location.startswith("."):
        raise CheckpointError(f"{location}: not a directory, a .gguf file or a hub id (owner/name)")
    return _from_hub(location, revision)


def _from_hub(name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{name}: to download from the hub, install the export extra: pip install 'mars-export[export]'"
        ) from error
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=HUB_FILES))
    except Exception as error:  # network, authentication, unknown name: the hub has dozens of exception types
        detail = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{name}: no such directory here, and the hub could not be asked ({type(error).__name__}: {detail})"
        ) from error


def _snapshot(directory: Path) -> str | None:
    """The commit that a hub download was pinned to: the cache keeps one directory for each."""
    return directory.name if directory.parent.name == "snapshots" else None
