"""Seeded tiny checkpoints, written by transformers' own classes: the oracle and the exporter read the same
files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel

from mars_export.runtime.bundle.manifest import TextInfo
from mars_export.runtime.text.tokenizer import Text

Named = Callable[[str], Path]
"""The directory of the tiny checkpoint, or its bundle, with a given name."""

CLASSES: Mapping[str, tuple[type, type]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
    "gemma3_text": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
    "granite": (transformers.GraniteConfig, transformers.GraniteForCausalLM),
    "ministral3": (transformers.Ministral3Config, transformers.Ministral3ForCausalLM),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
    "exaone4": (transformers.Exaone4Config, transformers.Exaone4ForCausalLM),
    "ernie4_5": (transformers.Ernie4_5Config, transformers.Ernie4_5ForCausalLM),
    "hunyuan_v1_dense": (transformers.HunYuanDenseV1Config, transformers.HunYuanDenseV1ForCausalLM),
    "seed_oss": (transformers.SeedOssConfig, transformers.SeedOssForCausalLM),
    "helium": (transformers.HeliumConfig, transformers.HeliumForCausalLM),
    "qwen3_5_text": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
}
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
MERGES = ("Ġ t", "h e", "Ġt he", "i n", "e r", "a n", "Ġ a", "o n", "Ã ©")
NUM_BYTES = 256
ENDOFTEXT, IM_START, IM_END, MASK = range(NUM_BYTES + len(MERGES), NUM_BYTES + len(MERGES) + len(SPECIALS))
NUM_TOKENS = NUM_BYTES + len(MERGES) + len(SPECIALS)
VOCAB_SIZE = 288  # padded beyond the tokenizer, as real embeddings are
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>"
    "\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Tiny:
    """One checkpoint to write.

    `declared` is the model_type that config.json is rewritten to; `settings` go to the config class, and
    `rewritten` are changes of config.json afterwards: another dialect for the same (None removes a field).
    """

    name: str
    family: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    sharded: bool = False
    declared: str | None = None
    seed: int = 0
    rewritten: Mapping[str, Any] | None = None


# Heads as wide as the reproducible steps of a CPU need them; `OWN` has keys and values for each head.
WIDE = Tiny("wide", "llama", {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32})
OWN = Tiny("own", "llama", {**WIDE.settings, "num_key_value_heads": 4})
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}
MIXED = ["full_attention", "sliding_attention", "full_attention"]

TINIES = {
    tiny.name: tiny
    for tiny in (
        Tiny("a2d-qwen2", "qwen2", declared="a2d-qwen2"),
        Tiny("llama", "llama", {"head_dim": 12, "rope_parameters": LLAMA3}, tied=True),
        Tiny("llama-bias", "llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR},
         sharded=True),
        Tiny("mistral", "mistral", {"head_dim": 20, "sliding_window": 6}, sharded=True),
        Tiny("qwen2", "qwen2", {"rope_parameters": YARN}, tied=True),
        Tiny("qwen2-mha", "qwen2", {"num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 5,
         "max_window_layers": 1}, sharded=True),
        Tiny("qwen3", "qwen3", {"head_dim": 20}, tied=True, sharded=True),
        Tiny("qwen3-mixed", "qwen3", {"head_dim": 12, "attention_bias": True, "use_sliding_window": True,
         "sliding_window": 7, "layer_types": MIXED}),
        Tiny("a2d-qwen3", "qwen3", {"head_dim": 24}, declared="a2d-qwen3"),
    )
}  # fmt: skip


def config_values(tiny: Tiny) -> dict[str, Any]:
    """Settings of the transformers config class."""
    layers = len(tiny.settings["layer_types"]) if tiny.settings.get("layer_types") else 2
    base: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": tiny.tied, "bos_token_id": ENDOFTEXT,
        "eos_token_id": IM_END, "pad_token_id": ENDOFTEXT,
    }  # fmt: skip
    return base | dict(tiny.settings)


def build(tiny: Tiny) -> PreTrainedModel:
    """A model with seeded weights: no bias is zero, no norm is one, and predictions are sure often enough to
    be accepted.
    """
    config_class, model_class = CLASSES[tiny.family]
    model: PreTrainedModel = model_class(config_class(**config_values(tiny)))
    generator = torch.Generator().manual_seed(1000 + tiny.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(name, parameter, noise))
    return model.float().eval()


def _scaled(name: str, parameter: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    if name.endswith("norm.weight"):
        # Some families store the difference from one.
        return 0.2 * noise + (0 if parameter.abs().max() == 0 else 1)
    if name.endswith(("bias", "A_log")):
        return 0.3 * noise
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return 0.9 * noise
    return noise * 2.0 / parameter[0].numel() ** 0.5


def write(tiny: Tiny, directory: Path) -> Path:
    """Write the whole checkpoint: config, weights, tokenizer."""
    save(build(tiny), directory, sharded=tiny.sharded)
    if tiny.declared is not None:
        architecture = {"a2d-qwen2": "A2DQwen2LMHeadModel", "a2d-qwen3": "A2DQwen3LMHeadModel"}[tiny.declared]
        change_config(directory, model_type=tiny.declared, architectures=[architecture])
    if tiny.rewritten is not None:
        change_config(directory, **tiny.rewritten)
    return directory


def save(model: PreTrainedModel, directory: Path, *, sharded: bool = False) -> None:
    """Write a model that was changed in memory, with the tiny tokenizer."""
    model.save_pretrained(directory, max_shard_size="60KB" if sharded else "1GB")
    write_tokenizer(directory)


def without_mask(directory: Path) -> Path:
    """Take the mask token out of a checkpoint's tokenizer, as in a stock model's."""
    raw = json.loads((directory / "tokenizer.json").read_text())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] != "<|mask|>"]
    (directory / "tokenizer.json").write_text(json.dumps(raw))
    change_config(directory, "tokenizer_config.json", mask_token=None)
    return directory


def load(tiny: Tiny, directory: Path) -> PreTrainedModel:
    """The written checkpoint in its stock causal class: what the oracle runs."""
    config_class, model_class = CLASSES[tiny.family]
    values = json.loads((directory / "config.json").read_text())
    config = config_class(**{k: v for k, v in values.items() if k not in ("model_type", "architectures")})
    model = model_class.from_pretrained(
        directory, config=config, attn_implementation="eager", dtype=torch.float32
    )
    return model.eval()


def change_config(directory: Path, name: str = "config.json", **changes: Any) -> None:
    """Rewrite fields of a JSON file of a checkpoint; None removes a field."""
    values = json.loads((directory / name).read_text()) | changes
    (directory / name).write_text(json.dumps({k: v for k, v in values.items() if v is not None}, indent=2))


def tokenizer() -> Tokenizer:
    """Byte-level BPE: 256 bytes, a few merges, the special tokens of a chat model and the mask."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    vocab = {token: i for i, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return made


def text(
    tokenizer: Tokenizer,
    template: str | None = None,
    bos: str | None = None,
    eos: str | None = None,
    *,
    parse_special: bool = False,
    **fields: Any,
) -> Text:
    """The text of a bundle with this tokenizer and template; `fields` are more of a TextInfo."""
    return Text(tokenizer, TextInfo("", template, bos, eos, **fields), parse_special=parse_special)


def write_tokenizer(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
