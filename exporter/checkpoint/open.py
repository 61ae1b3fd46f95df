"""Opens a MARS checkpoint: a directory, a hub id, an adapter or a GGUF file.

Of `model_type: sdar`, I-DLM's checkpoints are causal and are read as Qwen3, SDAR's own are refused. Both have
the same class, tensor names and mask token. Only the config field `use_regular_causal`, or its default in the
class that comes with the checkpoint, tells them apart. That class is never run.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from ...runtime.errors import CheckpointError, MarsWarning
from ...runtime.rules import is_integer
from . import adapter, default
from .dims import Dims, check_shapes, dims_from_config
from .names import EMBEDDING, HEAD
from .stock import text_config
from .tensors import Tensors, TextTensors, open_tensors, read_json, read_text, reading, same_numbers, shown
from .vocabulary import VOCABULARIES, Vocabulary, read_vocabulary

MODEL_TYPE = "sdar"
CLASS_FILE = "configuration_sdar.py"
CAUSAL_BY_DEFAULT = re.compile(r"\buse_regular_causal\s*(?::\s*\w+\s*)?=\s*True\b")
RELAY = "relay_layer_norm."
MAX_MASKS = 63  # with the known token they are the largest block


def trained_masks(
    directory: Path, config: Mapping[str, Any], tensor_names: Collection[str], causal: bool
) -> int | None:
    """The number of masks of a block in training, `block_size`; None for other model types.

    `causal`: the user's word that attention is causal, if the checkpoint does not say. Raises CheckpointError
    for a checkpoint whose attention is or may be bidirectional, and for one with relayed hidden states.
    """
    if config.get("model_type") != MODEL_TYPE:
        return None
    if config.get("use_relay") or any(name.startswith(RELAY) for name in tensor_names):
        raise CheckpointError(
            f"{directory}: a relay variant of I-DLM (`use_relay`, `{RELAY}*`), which feeds hidden states of"
            " one step to the next; a step of this exporter takes token ids only"
        )
    declared = config.get("use_regular_causal")
    if declared is False or not (declared or causal or _is_causal_by_default(directory)):
        raise CheckpointError(
            f"{directory}: SDAR and I-DLM checkpoints have the same names. SDAR's attention is bidirectional"
            " inside a block, which this causal loop cannot run (docs/families.md). I-DLM's is causal, but"
            f" config.json says `use_regular_causal: {shown(declared)}`, and {CLASS_FILE} does not set it to"
            " True" + ("" if declared is False else "; if this is an I-DLM checkpoint, add --causal")
        )
    masks = config.get("block_size")
    if not is_integer(masks, 1) or masks > MAX_MASKS:
        raise CheckpointError(
            f"{directory}: config.json: `block_size`, the masks of a block in training, must be 1 to"
            f" {MAX_MASKS}, not {shown(masks)}"
        )
    return int(masks)


def _is_causal_by_default(directory: Path) -> bool:
    """Whether the text of the checkpoint's config class sets `use_regular_causal` to True by default."""
    path = directory / CLASS_FILE
    with reading(path):
        text = read_text(path) if path.is_file() else ""
    return CAUSAL_BY_DEFAULT.search(re.sub(r"#.*", "", text)) is not None


HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt", CLASS_FILE]
DEFAULT_BLOCK = 8


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose tensors are ready to stream.

    `source` and `revision` name its origin, for the bundle's manifest. `model` and `adapter` are the
    directories that were read. `trained_masks`: masks of a block in training, if a step may have one more at
    most; None if unknown, 0 for a model without masks. `trained_block`: the block that it records.
    """

    source: str
    revision: str | None
    dims: Dims
    tensors: Tensors
    vocabulary: Vocabulary
    model: Path
    adapter: Path | None = None
    long_context: bool = False
    trained_masks: int | None = None
    trained_block: int | None = None

    @property
    def block(self) -> int:
        """The block of an export by default: with an MTP layer, the next token and its draft tokens."""
        if self.dims.mtp:
            return 1 + self.dims.mtp.drafts
        return self.trained_block or DEFAULT_BLOCK

    @property
    def masks(self) -> int | None:
        """The most masks of a step: one more than the trained ones, because its draft token often holds."""
        return self.trained_masks + 1 if self.trained_masks else self.trained_masks


def open_checkpoint(
    location: str | None,
    *,
    revision: str | None = None,
    base: str | None = None,
    mask_token: str | None = None,
    tied: bool | None = None,
    tokenizer: str | None = None,
    long_context: bool = False,
    masks: bool = True,
    causal: bool = False,
) -> Checkpoint:
    """Open a Hugging Face directory, hub id, PEFT adapter directory or GGUF file; None opens the default.

    Weights are not read yet, except for file headers (and two tables that may be one). `base` overrides the
    base model that an adapter names. `tied` says whether lm_head is the embedding, if config.json and the
    weights disagree. `tokenizer` is a directory of tokenizer files that replace the checkpoint's.
    `long_context` selects longrope's frequencies for long texts. Without `masks` the checkpoint needs no mask
    token; its MTP layer is left out then, and if there is a mask token. `causal`: an `sdar` checkpoint is
    I-DLM's.
    Raises CheckpointError, listing all problems of one kind.
    """
    try:
        for library in ("torch", "transformers", "safetensors"):
            import_module(library)
    except ImportError as error:
        raise CheckpointError(f"{error}: to read a checkpoint, pip install 'mars-export[export]'") from error
    if location is None:
        location = str(default.adapter_directory())
    _warn_of_other_loops(location)
    own_tokenizer = [] if tokenizer is None else [_tokenizer_directory(tokenizer)]
    directory = model = _directory(location, revision, rebuild_tokenizer=tokenizer is None)
    config_of_adapter = None
    if (directory / adapter.CONFIG_FILE).is_file():
        _refuse_draft_adapter(directory, "automodel_peft_config.json")  # NeMo writes it beside them
        config_of_adapter = adapter.read_adapter_config(directory)
        base = base or config_of_adapter.base
        if base is None:
            raise CheckpointError(
                f"{directory / adapter.CONFIG_FILE}: no `base_model_name_or_path`; name the base with --base"
            )
        is_default = base == default.BASE_NAME
        model = default.base_directory() if is_default else _directory(base, config_of_adapter.revision)
    if not (model / "config.json").is_file():
        raise CheckpointError(f"{model}: no config.json; is this a Hugging Face model directory?")
    config = read_json(model / "config.json")
    if config.get("model_type") == "sdar":
        _refuse_draft_adapter(model, f"adapter/{adapter.CONFIG_FILE}")
    dims = dims_from_config(config, long_context=long_context)
    weights, config = config.get("transformers_weights"), dict(text_config(config))
    _refuse_codes(model, config.get("quantization_config"))
    tensors = open_tensors(model, weights)
    if dims.recurrent is not None:
        # Fine-tuning, and transformers, lose an MTP layer that config.json still counts.
        has_mtp = any(name.startswith("mtp.") for name in tensors.shapes)
        dims = replace(dims, mtp=dims.mtp if has_mtp and masks and mask_token is None else None)
        tensors = TextTensors(tensors, mtp=dims.mtp is not None)
    trained = trained_masks(model, config, tensors.shapes, causal)
    dims = replace(dims, tied=_is_tied(model, dims.tied, tensors, tied))
    if config_of_adapter is not None:
        tensors = adapter.MergedTensors(tensors, directory, config_of_adapter, dims.tied)
        # An adapter with additional tokens has a longer embedding.
        shape = tensors.shapes[EMBEDDING] if EMBEDDING in tensors.replaced else ()
        dims = replace(dims, tied=tensors.tied, vocab_size=shape[0] if shape else dims.vocab_size)
    check_shapes(dims, tensors.shapes)
    directories = list(dict.fromkeys((*own_tokenizer, directory, model)))
    # An MTP layer proposes tokens instead of masks, unless a mask token is named, here or by the tokenizer.
    dims = replace(dims, mtp=dims.mtp if masks and mask_token is None else None)

    def read(masks: bool) -> Vocabulary:
        return read_vocabulary(directories, config, dims.vocab_size, mask_token, location, masks=masks)

    vocabulary = read(masks and not dims.mtp)
    if dims.mtp and vocabulary.named_mask is not None:
        dims, vocabulary = replace(dims, mtp=None), read(masks)
    masks = masks and not dims.mtp
    is_ours = default.is_embedded(directory)
    # The cache of hub downloads has a directory for each commit.
    snapshot = directory.name if directory.parent.name == "snapshots" else None
    return Checkpoint(
        source=default.NAME if is_ours else location,
        revision=default.adapter_digest() if is_ours else revision or snapshot,
        dims=dims,
        tensors=tensors,
        vocabulary=vocabulary,
        model=model,
        adapter=None if directory == model else directory,
        long_context=long_context,
        trained_masks=trained if masks else 0,
        trained_block=(trained + 1 if trained else _recorded_block(directory, model)) if masks else None,
    )


def _recorded_block(*directories: Path) -> int | None:
    """The `mars_block` of the first tokenizer_config.json that has one. examples/finetune writes it."""
    for path in (directory / "tokenizer_config.json" for directory in directories):
        block = read_json(path).get("mars_block") if path.is_file() else None
        if block is not None and not is_integer(block, 1):
            raise CheckpointError(f"{path}: `mars_block` must be an integer of 1 or more, not {shown(block)}")
        if block is not None:
            return block
    return None


def _warn_of_other_loops(location: str) -> None:
    """Warn about BD3LM checkpoints of the MARS authors, whose name alone distinguishes them: config, weights
    and mask are those of a MARS checkpoint.
    """
    if "bd3lm" in Path(location).name.lower():
        warnings.warn(
            f"{location}: by its name a BD3LM checkpoint, trained to fill blocks with attention in both"
            " directions; such a checkpoint answers nonsense in this causal loop (docs/families.md)",
            MarsWarning,
            stacklevel=3,
        )


def _refuse_codes(directory: Path, setting: object) -> None:
    """Raise CheckpointError for weights that are codes already: `setting` is config.json's
    `quantization_config`; older AutoGPTQ wrote a file instead.
    """
    file = "config.json"
    if not setting and (directory / "quantize_config.json").is_file():
        file, setting = "quantize_config.json", {"quant_method": "gptq"}
    if setting:
        method = setting.get("quant_method") if isinstance(setting, dict) else None
        raise CheckpointError(
            f"{directory}: the weights are quantized ({file}: `quant_method` {shown(method)}); export from"
            " the unquantized checkpoint, and --precision quantizes it (docs/quantization.md)"
        )


def _refuse_draft_adapter(directory: Path, mark: str) -> None:
    """Raise CheckpointError if the file `mark` shows an adapter that acts at draft slots only."""
    if (directory / mark).is_file():
        raise CheckpointError(
            f"{directory}: {mark} belongs to an adapter that acts at draft slots only, which cannot be"
            " exported; merged into every slot it gives nonsense. Export the base model, or merge an adapter"
            " that was trained without a gate: `model.merge_and_unload().save_pretrained(path)`"
        )


def _is_tied(directory: Path, declared: bool, tensors: Tensors, choice: bool | None) -> bool:
    """Whether lm_head is the embedding. Raises CheckpointError if it should be, but another is stored."""
    if choice is not None or not declared or not {HEAD, EMBEDDING} <= tensors.shapes.keys():
        return declared if choice is None else choice
    if not same_numbers(tensors.read(EMBEDDING), tensors.read(HEAD)):
        raise CheckpointError(
            f"{directory}: config.json says `tie_word_embeddings`, but another lm_head.weight is stored:"
            " transformers 4 takes the embedding for it, transformers 5 the stored one. Say which was"
            " trained: --tied or --untied"
        )
    return True


def _path(location: str) -> Path:
    with reading(shown(location)):  # an adapter may name anything as its base
        path = Path(location).expanduser()
        path.is_dir()
        return path


def _tokenizer_directory(location: str) -> Path:
    path = _path(location)
    if not any((path / name).is_file() for name in VOCABULARIES):
        raise CheckpointError(f"{location}: not a directory with a tokenizer.json, which --tokenizer needs")
    return path


def _directory(location: str, revision: str | None, rebuild_tokenizer: bool = True) -> Path:
    path = _path(location)
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CheckpointError(f"{location}: no such file")
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":  # checked before the whole file is hashed
                raise CheckpointError(f"{location}: not a readable GGUF file; download it again")
        return default.converted(path, rebuild_tokenizer)
    if path.exists() or path.is_absolute() or location.count("/") != 1 or location.startswith("."):
        raise CheckpointError(f"{location}: not a directory, a .gguf file or a hub id (owner/name)")
    return _from_hub(location, revision)


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=HUB_FILES))
    except Exception as error:  # network, authentication, unknown name: the hub has dozens of exception types
        detail = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{name}: no such directory, and the hub returned an error ({type(error).__name__}: {detail})"
        ) from error
