"""GGUF file -> Hugging Face directory. Knows llama.cpp's names and its permuted rotary rows; knows nothing about MARS or ONNX."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...runtime.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import GGUFReader

# llama.cpp's name of a tensor inside `blk.{i}.` -> its Hugging Face name inside `model.layers.{i}.`
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# The pre-tokenizers we can rebuild exactly, by llama.cpp's name for them.
DIGIT_SPLITTING = {"smollm"}
CONTROL_TOKEN = 3  # llama.cpp's token type of a special token


def convert(path: Path, directory: Path) -> None:
    """Write `config.json`, `model.safetensors` (dequantized to fp32) and the tokenizer of a GGUF file to `directory`.

    Raises CheckpointError when the architecture or the tokenizer is not one we rebuild exactly.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    try:
        reader = GGUFReader(str(path))
    except (ValueError, OSError, IndexError) as error:
        raise CheckpointError(f"{path}: not a readable GGUF file ({error}); download it again") from error
    config = _config(path, reader)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(path, reader, config)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)
    _write_tokenizer(path, reader, directory)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _field(path: Path, reader: GGUFReader, name: str, default: Any = None) -> Any:
    field = reader.get_field(name)
    if field is not None:
        return field.contents()
    if default is None:
        raise CheckpointError(f"{path}: GGUF metadata has no `{name}`; convert the original checkpoint again")
    return default


def _config(path: Path, reader: GGUFReader) -> dict[str, Any]:
    arch = _field(path, reader, "general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(f"{path}: GGUF architecture `{arch}` is not supported (known: {known})")
    if reader.get_field(f"{arch}.rope.scaling.type") is not None or any(
        t.name == "rope_freqs.weight" for t in reader.tensors
    ):
        raise CheckpointError(
            f"{path}: scaled rope in a GGUF file is not supported; export the original Hugging Face checkpoint"
        )
    hidden = int(_field(path, reader, f"{arch}.embedding_length"))
    heads = int(_field(path, reader, f"{arch}.attention.head_count"))
    return {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_size": hidden,
        "intermediate_size": int(_field(path, reader, f"{arch}.feed_forward_length")),
        "num_hidden_layers": int(_field(path, reader, f"{arch}.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(_field(path, reader, f"{arch}.attention.head_count_kv", heads)),
        "head_dim": int(_field(path, reader, f"{arch}.attention.key_length", hidden // heads)),
        "hidden_act": "silu",
        "rms_norm_eps": float(_field(path, reader, f"{arch}.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(_field(path, reader, f"{arch}.rope.freq_base", 10000.0)),
        "max_position_embeddings": int(_field(path, reader, f"{arch}.context_length")),
        "vocab_size": len(_field(path, reader, "tokenizer.ggml.tokens")),
        "bos_token_id": int(_field(path, reader, "tokenizer.ggml.bos_token_id", 0)),
        "eos_token_id": int(_field(path, reader, "tokenizer.ggml.eos_token_id", 0)),
        "torch_dtype": "float32",
    }


def _tensors(path: Path, reader: GGUFReader, config: dict[str, Any]) -> dict[str, np.ndarray]:
    from gguf.quants import dequantize

    tensors = {}
    unknown = []
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        if name is None:
            unknown.append(tensor.name)
            continue
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = values.reshape(tuple(int(n) for n in reversed(tensor.shape)))
        if config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _unpermute(values, config["head_dim"])
        tensors[name] = np.ascontiguousarray(values)
    if unknown:
        raise CheckpointError(f"{path}: GGUF tensors with no known place in the model: {', '.join(unknown)}")
    return tensors


def _hf_name(name: str) -> str | None:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    known = GLOBAL_NAMES.get(part) if layer is None else LAYER_NAMES.get(part)
    if known is None:
        return None
    return f"{known}.{kind}" if layer is None else f"model.layers.{layer}.{known}.{kind}"


def _unpermute(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """llama.cpp interleaves the two rotary halves of Llama's q and k rows; Hugging Face keeps them apart."""
    rows, columns = weight.shape
    return weight.reshape(rows // head_dim, head_dim // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(path: Path, reader: GGUFReader, directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, pre = _field(path, reader, "tokenizer.ggml.model"), _field(path, reader, "tokenizer.ggml.pre", "?")
    if kind != "gpt2" or pre not in DIGIT_SPLITTING:
        raise CheckpointError(
            f"{path}: the GGUF tokenizer `{kind}`/`{pre}` cannot be rebuilt exactly (known: gpt2/{', gpt2/'.join(sorted(DIGIT_SPLITTING))});"
            " export the original Hugging Face checkpoint"
        )
    tokens: list[str] = _field(path, reader, "tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ", 1)) for m in _field(path, reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = _field(path, reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    eos = tokens[int(_field(path, reader, "tokenizer.ggml.eos_token_id"))]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "pad_token": eos,
        "clean_up_tokenization_spaces": False,
    }
    template = reader.get_field("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template.contents()
    _write_json(directory / "tokenizer_config.json", config)
