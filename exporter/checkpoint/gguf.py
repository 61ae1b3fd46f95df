"""Converts a GGUF file to a Hugging Face directory: metadata, tokenizer and tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...runtime.errors import CheckpointError
from . import names
from .tensors import first_of, reading, shown

if TYPE_CHECKING:
    from gguf import GGUFReader


ORIGINAL = "export the original Hugging Face checkpoint"


class Fields:
    """GGUF metadata by name."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path, self._fields = path, reader.fields

    def names(self) -> list[str]:
        return list(self._fields)

    def get(self, name: str, default: Any = None) -> Any:
        """A field's value, or `default` if it is absent."""
        field = self._fields.get(name)
        return default if field is None else field.contents()

    def need(self, name: str, kind: Any, default: Any = None) -> Any:
        """A field's value. Raises CheckpointError unless it is of type `kind`."""
        value = self.get(name, default)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise CheckpointError(
                f"{self.path}: the GGUF field `{name}` cannot be {shown(value)}; {ORIGINAL}"
            )
        return value

    def token_id(self, name: str) -> int | None:
        """The id of a special token. Raises CheckpointError if it is not that of a token."""
        name = f"tokenizer.ggml.{name}_token_id"
        if name not in self._fields:
            return None
        value: int = self.need(name, int)
        if not 0 <= value < len(self.need("tokenizer.ggml.tokens", list)):
            raise CheckpointError(f"{self.path}: the GGUF field `{name}` cannot be {value}; {ORIGINAL}")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value: int = self.need(name, int, default)
        if not 0 < value < 2**31:
            raise CheckpointError(f"{self.path}: the GGUF field `{name}` cannot be {value}; {ORIGINAL}")
        return value


# Published with the models: how a text is split before its parts become tokens.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {"qwen2": WORDS.format(digits=""), "llama-bpe": WORDS.format(digits="{1,3}"), "smollm": None}
# llama.cpp's types of special tokens, and of other tokens that are not split.
CONTROL_TOKEN, USER_TOKEN = 3, 4
# Control tokens at which llama.cpp ends an answer whatever the metadata says.
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>")


def write_tokenizer(fields: Fields, directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`.

    Raises CheckpointError for a tokenizer that cannot be rebuilt exactly.
    """
    kind, pre = fields.need("tokenizer.ggml.model", str), fields.need("tokenizer.ggml.pre", str, "?")
    if kind != "gpt2" or pre not in SPLITS:
        known = ", ".join(f"gpt2/{name}" for name in sorted(SPLITS))
        raise CheckpointError(
            f"{fields.path}: the GGUF tokenizer `{kind[:40]}`/`{pre[:40]}` cannot be rebuilt exactly (known:"
            f" {known}); name a directory with the original tokenizer.json by --tokenizer"
        )
    tokens, types, merges = (
        fields.need(f"tokenizer.ggml.{name}", list) for name in ("tokens", "token_type", "merges")
    )
    ids = {name: fields.token_id(name) for name in ("bos", "eos", "padding", "mask")}
    named = {name: tokens[i] for name, i in ids.items() if i is not None}
    adds_bos = fields.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
    if "eos" not in named or (adds_bos and "bos" not in named):
        raise CheckpointError(
            f"{fields.path}: no `tokenizer.ggml.eos_token_id`, or no `bos_token_id` to begin with; {ORIGINAL}"
        )
    with reading(f"{fields.path}: its tokenizer"):
        tokenizer = _tokenizer(pre, tokens, types, merges, named["bos"] if adds_bos else None)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": named.pop("padding", named["eos"]),
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": token for name, token in named.items()},
    }
    template = fields.get("tokenizer.chat_template")
    others = fields.get("tokenizer.chat_templates", [])
    if isinstance(template, str):
        forms = [(name, fields.get(f"tokenizer.chat_template.{name}")) for name in others]
        named_forms = [{"name": name, "template": form} for name, form in [("default", template), *forms]]
        config["chat_template"] = named_forms if others else template
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _tokenizer(pre: str, tokens: list[str], types: list[int], merges: list[str], bos: str | None) -> Any:
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )

    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    is_llama, split = pre == "llama-bpe", SPLITS[pre]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=is_llama))
    cut = (
        pre_tokenizers.Digits(individual_digits=True)
        if split is None
        else pre_tokenizers.Split(Regex(split), behavior="isolated")
    )
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, letters])
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocab[bos])]
        )
    whole = [
        (token, kind)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL_TOKEN, USER_TOKEN)
    ]
    tokenizer.add_tokens(
        [AddedToken(token, special=kind == CONTROL_TOKEN, normalized=False) for token, kind in whole]
    )
    return tokenizer


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


def _ends(fields: Fields) -> list[int]:
    """The tokens that end an answer: those that the file names, and those with the name of such an end."""
    named = [i for i in map(fields.token_id, ("eos", "eot", "eom")) if i is not None]
    tokens, types = (fields.need(f"tokenizer.ggml.{name}", list, []) for name in ("tokens", "token_type"))
    pairs = enumerate(zip(tokens, types, strict=False))
    return list(
        dict.fromkeys([*named, *(i for i, (t, kind) in pairs if kind == CONTROL_TOKEN and t in ENDS)])
    )


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
        "eos_token_id": _ends(fields),
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
