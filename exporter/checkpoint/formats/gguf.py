"""Converts a GGUF file to a Hugging Face directory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ....runtime.errors import CheckpointError
from ..architecture import names
from ..tensors import listed, shown
from .gguf_tokenizer import write_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFReader

# llama.cpp's name of a tensor inside `blk.{i}.` -> its Hugging Face name inside the layer
LAYER_NAMES = {
    "attn_norm": names.INPUT_NORM,
    "attn_q": names.Q,
    "attn_k": names.K,
    "attn_v": names.V,
    "attn_q_norm": names.Q_NORM,
    "attn_k_norm": names.K_NORM,
    "attn_output": names.O,
    "ffn_norm": names.POST_NORM,
    "ffn_gate": names.GATE,
    "ffn_up": names.UP,
    "ffn_down": names.DOWN,
}
GLOBAL_NAMES = {"token_embd": names.EMBEDDING, "output_norm": names.FINAL_NORM, "output": names.HEAD}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Fields of an architecture that are read here or change nothing; any other could change the result.
KNOWN_FIELDS = {
    "embedding_length",
    "feed_forward_length",
    "block_count",
    "context_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "tensor_data_layout",
}
SCALES = ("scale", "factor", "linear")  # last words of the names of fields that have no effect if they are 1
UNREADABLE = (ValueError, OSError, IndexError, KeyError, OverflowError, MemoryError)
ORIGINAL = "export the original Hugging Face checkpoint"


def convert(path: Path, directory: Path, with_tokenizer: bool = True) -> None:
    """Write `config.json`, `model.safetensors` (dequantized to fp32) and the tokenizer of a GGUF file to
    `directory`.

    Raises CheckpointError for an architecture or a tokenizer that cannot be rebuilt exactly.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    try:
        reader = GGUFReader(str(path))
    except UNREADABLE as error:
        raise _unreadable(path, error) from error
    fields = _Fields(path, reader)
    config = _config(fields)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(path, reader, config)
    config["tie_word_embeddings"] = names.HEAD not in tensors
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)
    if with_tokenizer:
        write_tokenizer(fields, directory)


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path}: not a readable GGUF file ({str(error)[:200]}); download it again")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class _Fields:
    """GGUF metadata by name and type. Raises CheckpointError for absent fields or those of another type."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path, self.reader = path, reader

    def names(self) -> list[str]:
        return list(self.reader.fields)

    def get(self, name: str) -> Any:
        """A field's value; None if it is absent."""
        field = self.reader.get_field(name)
        try:
            return None if field is None else field.contents()
        except (ValueError, IndexError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{self.path}: the GGUF field `{name[:80]}` is not readable ({error}); download the file"
                " again"
            ) from error

    def integer(self, name: str, default: int | None = None, low: int = 1) -> int:
        value = self._of(name, default, int)
        if isinstance(value, bool) or not low <= value < 2**31:
            raise self._wrong(name, value)
        return int(value)

    def decimal(self, name: str, default: float | None = None) -> float:
        return float(self._of(name, default, int | float))

    def text(self, name: str, default: str | None = None) -> str:
        return str(self._of(name, default, str))

    def items(self, name: str, kind: type) -> list[Any]:
        values = self._of(name, None, list)
        if not all(isinstance(value, kind) for value in values):
            raise self._wrong(name, values)
        return list(values)

    def _of(self, name: str, default: Any, kind: Any) -> Any:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(
                f"{self.path}: GGUF metadata has no `{name}`; convert the original checkpoint again"
            )
        if not isinstance(value, kind):
            raise self._wrong(name, value)
        return value

    def _wrong(self, name: str, value: object) -> CheckpointError:
        return CheckpointError(f"{self.path}: the GGUF field `{name}` cannot be {shown(value)}; {ORIGINAL}")


def _config(fields: _Fields) -> dict[str, Any]:
    path, arch = fields.path, fields.text("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(f"{path}: GGUF architecture `{arch[:80]}` is not supported (known: {known})")
    if any(t.name == "rope_freqs.weight" for t in fields.reader.tensors):
        raise CheckpointError(f"{path}: scaled rope in a GGUF file is not supported; {ORIGINAL}")
    hidden, heads = (
        fields.integer(f"{arch}.embedding_length"),
        fields.integer(f"{arch}.attention.head_count"),
    )
    head_dim = fields.integer(f"{arch}.attention.key_length", hidden // heads)
    problems = _unknown_features(fields, arch)
    for name in ("rope.dimension_count", "attention.value_length"):
        if (size := fields.integer(f"{arch}.{name}", head_dim)) != head_dim:
            problems.append(f"{name} {size}, with heads of {head_dim}")
    if problems:
        raise CheckpointError(f"{path}: not supported in a GGUF file: {listed(problems)}; {ORIGINAL}")
    return {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_size": hidden,
        "intermediate_size": fields.integer(f"{arch}.feed_forward_length"),
        "num_hidden_layers": fields.integer(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": fields.decimal(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.decimal(f"{arch}.rope.freq_base", 10000.0),
        "max_position_embeddings": fields.integer(f"{arch}.context_length"),
        "vocab_size": len(fields.items("tokenizer.ggml.tokens", str)),
        "bos_token_id": fields.integer("tokenizer.ggml.bos_token_id", 0, low=0),
        "eos_token_id": fields.integer("tokenizer.ggml.eos_token_id", 0, low=0),
        "torch_dtype": "float32",
    }


def _unknown_features(fields: _Fields, arch: str) -> list[str]:
    """Fields that this converter does not read, unless their value means that a feature is off."""
    problems = []
    for name in fields.names():
        part = name.removeprefix(f"{arch}.")
        if part == name or part in KNOWN_FIELDS:
            continue
        value = fields.get(name)
        is_scale = part.replace("_", ".").split(".")[-1] in SCALES
        if (
            value not in (0, False, "none", "", [])
            and not (is_scale and value == 1)
            and not (part == "attention.causal" and value is True)
        ):
            problems.append(f"{part[:80]} {shown(value)}")
    return problems


def _tensors(path: Path, reader: GGUFReader, config: dict[str, Any]) -> dict[str, np.ndarray]:
    from gguf.quants import dequantize

    tensors, unknown = {}, []
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        if name is None:
            unknown.append(tensor.name[:80])
            continue
        try:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            values = values.reshape(tuple(int(n) for n in reversed(tensor.shape)))
            if config["model_type"] == "llama" and name.endswith((f"{names.Q}.weight", f"{names.K}.weight")):
                values = _unpermute(values, config["head_dim"])
        except (ValueError, NotImplementedError, IndexError) as error:
            raise CheckpointError(
                f"{path}: GGUF tensor `{tensor.name[:80]}` is not readable ({str(error)[:200]}); {ORIGINAL}"
            ) from error
        tensors[name] = np.ascontiguousarray(values)
    if unknown:
        raise CheckpointError(f"{path}: unknown GGUF tensors: {listed(unknown)}")
    return tensors


def _hf_name(name: str) -> str | None:
    match = re.fullmatch(r"(?:blk\.([0-9]{1,5})\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    if layer is None:
        return GLOBAL_NAMES.get(part) if kind == "weight" else None
    known = LAYER_NAMES.get(part)
    return None if known is None else f"{names.layer(int(layer))}{known}.{kind}"


def _unpermute(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Separate the two rotary halves of Llama's q and k rows, which llama.cpp interleaves."""
    rows, columns = weight.shape
    return weight.reshape(rows // head_dim, head_dim // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
