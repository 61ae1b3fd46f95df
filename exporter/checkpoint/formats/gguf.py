"""Converts a GGUF file to a Hugging Face directory."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ....runtime.errors import CheckpointError
from ..architecture import names
from ..tensors import first_of, reading, shown
from .gguf_fields import ORIGINAL, Fields
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
# Fields of an architecture, of the tokenizer and of a file in parts that are read here or change nothing; any
# other of these could change the result.
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
    *(f"tokenizer.ggml.{name}" for name in ("model", "pre", "tokens", "token_type", "scores", "merges")),
    *("tokenizer.ggml.add_bos_token", "tokenizer.ggml.token_type_count"),
    *("split.no", "split.tensors.count"),
}
KNOWN_NAMES = re.compile(r"tokenizer\.(chat_template.*|huggingface\.json|ggml\.\w+_token_id)")
SCALES = ("scale", "factor", "linear")  # last words of the names of fields that have no effect if they are 1


def convert(path: Path, directory: Path, with_tokenizer: bool = True) -> None:
    """Write `config.json`, `model.safetensors` (dequantized to fp32) and the tokenizer of a GGUF file to
    `directory`.

    Raises CheckpointError for an architecture or a tokenizer that cannot be rebuilt exactly.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    try:
        reader = GGUFReader(str(path))
    except Exception as error:  # it raises many types
        raise CheckpointError(
            f"{path}: not a readable GGUF file ({str(error)[:200]}); download it again"
        ) from error
    with reading(path):
        fields = Fields(path, reader)
        config = _config(fields, [tensor.name for tensor in reader.tensors], with_tokenizer)
        directory.mkdir(parents=True, exist_ok=True)
        tensors = _tensors(path, reader, config)
        config["tie_word_embeddings"] = names.HEAD not in tensors
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if with_tokenizer:
            write_tokenizer(fields, directory)


def _config(fields: Fields, tensors: Sequence[str], with_tokenizer: bool) -> dict[str, Any]:
    path, arch = fields.path, fields.need("general.architecture", str)
    if arch not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(f"{path}: GGUF architecture `{arch[:80]}` is not supported (known: {known})")
    if "rope_freqs.weight" in tensors:
        raise CheckpointError(f"{path}: scaled rope in a GGUF file is not supported; {ORIGINAL}")
    hidden = fields.count(f"{arch}.embedding_length")
    heads = fields.count(f"{arch}.attention.head_count")
    head_dim = fields.count(f"{arch}.attention.key_length", hidden // heads)
    problems = _unknown_features(fields, arch, ("split.", "tokenizer.") if with_tokenizer else ("split.",))
    for name in ("rope.dimension_count", "attention.value_length"):
        if (size := fields.count(f"{arch}.{name}", head_dim)) != head_dim:
            problems.append(f"{name} {size}, with heads of {head_dim}")
    if problems:
        raise CheckpointError(f"{path}: not supported in a GGUF file: {first_of(problems)}; {ORIGINAL}")
    return {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_size": hidden,
        "intermediate_size": fields.count(f"{arch}.feed_forward_length"),
        "num_hidden_layers": fields.count(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": fields.need(f"{arch}.attention.layer_norm_rms_epsilon", float),
        "rope_theta": fields.need(f"{arch}.rope.freq_base", float, 10000.0),
        "max_position_embeddings": fields.count(f"{arch}.context_length"),
        "vocab_size": len(fields.need("tokenizer.ggml.tokens", list)),
        "bos_token_id": fields.token_id("bos"),
        # the ends of the text, of a turn, and of a message that calls a tool
        "eos_token_id": [i for i in map(fields.token_id, ("eos", "eot", "eom")) if i is not None],
        "torch_dtype": "float32",
    }


def _unknown_features(fields: Fields, arch: str, groups: tuple[str, ...]) -> list[str]:
    """Fields that this converter does not read, unless their value means that a feature is off."""
    problems = []
    for name in fields.names():
        part = name.removeprefix(f"{arch}.")
        if (
            (part == name and not name.startswith(groups))
            or part in KNOWN_FIELDS
            or KNOWN_NAMES.fullmatch(part)
        ):
            continue
        value = fields.get(name)
        is_scale = part.replace("_", ".").split(".")[-1] in SCALES
        if (
            value not in (0, False, "none", "", [])
            and not ((is_scale or part == "split.count") and value == 1)
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
        raise CheckpointError(f"{path}: unknown GGUF tensors: {first_of(unknown)}")
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
