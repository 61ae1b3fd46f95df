"""The table of decoder families: how each differs from Llama, and what its config fields mean.

A row is data, and a short function if numbers come from the config. The families that are refused are listed
with their reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ....runtime.errors import CheckpointError
from ..tensors import shown
from .knobs import POST, SANDWICH, HeadNorms, Knobs
from .rope import positive, rope_parameters

# The MARS authors' A2D classes and I-DLM's have stock weights under stock names, and inference is plainly
# causal. sdar.py tells I-DLM's from SDAR's own.
ALIASES = {"a2d-qwen2": "qwen2", "a2d-qwen3": "qwen3", "a2d-qwen3-it": "qwen3", "sdar": "qwen3"}

Config = Mapping[str, Any]
SILU, GELU_TANH = "silu", "gelu_tanh"
ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH}


@dataclass(frozen=True, slots=True)
class Family:
    """How a decoder family differs from Llama.

    A bias is True, False, or the config field that decides. `windows` are the layers with sliding windows:
    "no layer"; "all" if the config has a window; "flagged" by `use_sliding_window` and layer; "typed" by
    layer. `unrotated` are the layers without a rotary embedding: "no layer"; "listed" by `no_rope_layers`;
    "full" are those with full attention, if others slide. `rope_by_kind`: sliding layers have separate
    frequencies. `defaults`: transformers' values for fields that config.json omits (not for those that are
    null). `adjust` reads knobs from the config.
    """

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    knobs: Knobs = field(default_factory=Knobs)
    activation_field: str = "hidden_act"
    windows: str = "no layer"
    unrotated: str = "no layer"
    partial_rotary: bool = False
    rope_by_kind: bool = False
    defaults: Config = field(default_factory=dict)
    adjust: Callable[[Knobs, Config], Knobs] | None = None

    def knobs_of(self, config: Config) -> Knobs:
        """The family's knobs with what the config sets."""
        activation = str(config.get(self.activation_field) or "silu")
        if ACTIVATIONS.get(activation) != self.knobs.activation:
            known = [name for name, kind in ACTIVATIONS.items() if kind == self.knobs.activation]
            raise CheckpointError(
                f"config.json: {self.activation_field} `{activation[:80]}` is not supported"
                f" (known: {', '.join(known)})"
            )
        try:
            return self.knobs if self.adjust is None else self.adjust(self.knobs, config)
        except KeyError as error:
            raise CheckpointError(f"config.json: the parameter {error} is missing") from error

    def has_bias(self, which: bool | str, config: Config) -> bool:
        return which if isinstance(which, bool) else bool(config.get(which))


def _granite(knobs: Knobs, config: Config) -> Knobs:
    return replace(
        knobs,
        attention_scale=positive(config, "attention_multiplier"),
        embedding_factor=positive(config, "embedding_multiplier"),
        residual_factor=positive(config, "residual_multiplier"),
        logit_factor=1 / positive(config, "logits_scaling"),
    )


def _gemma(knobs: Knobs, config: Config) -> Knobs:
    if config.get("use_bidirectional_attention"):
        raise CheckpointError(
            "config.json: `use_bidirectional_attention` makes this an encoder; a causal decoder is expected"
        )
    return replace(
        knobs,
        attention_scale=positive(config, "query_pre_attn_scalar") ** -0.5,
        embedding_factor=positive(config, "hidden_size") ** 0.5,
        logit_cap=_cap(config, "final_logit_softcapping"),
    )


def _gemma2(knobs: Knobs, config: Config) -> Knobs:
    return replace(_gemma(knobs, config), attention_cap=_cap(config, "attn_logit_softcapping"))


def _ministral3(knobs: Knobs, config: Config) -> Knobs:
    params = rope_parameters(config)
    if params.get("llama_4_scaling_beta") is None:
        return knobs
    length = positive(params, "original_max_position_embeddings")
    if length != int(length):
        raise CheckpointError(
            f"config.json: `original_max_position_embeddings` must be whole, not {shown(length)}"
        )
    return replace(knobs, query_growth=(positive(params, "llama_4_scaling_beta"), int(length)))


def _cap(config: Config, name: str) -> float:
    return 0.0 if config.get(name) is None else positive(config, name)


LLAMA_BIASES: dict[str, Any] = {
    "qkv_bias": "attention_bias",
    "output_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
}
QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
GEMMA = Knobs(norms=SANDWICH, norm_offset=1.0, activation=GELU_TANH)
GEMMA_BIASES: dict[str, Any] = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
GEMMA_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
MINISTRAL3_ROPE = {
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(**LLAMA_BIASES),
    "mistral": Family(windows="all", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Family(qkv_bias=True, windows="flagged", defaults=QWEN_DEFAULTS),
    "qwen3": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        knobs=Knobs(head_norms=HeadNorms()),
        windows="flagged",
        defaults=QWEN_DEFAULTS | {"head_dim": 128},
    ),
    "gemma2": Family(
        **GEMMA_BIASES,
        knobs=GEMMA,
        activation_field="hidden_activation",
        windows="typed",
        defaults=GEMMA_DEFAULTS
        | {
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "max_position_embeddings": 8192,
        },
        adjust=_gemma2,
    ),
    "gemma3_text": Family(
        **GEMMA_BIASES,
        knobs=replace(GEMMA, head_norms=HeadNorms()),
        activation_field="hidden_activation",
        windows="typed",
        rope_by_kind=True,
        defaults=GEMMA_DEFAULTS | {"sliding_window_pattern": 6, "max_position_embeddings": 131072},
        adjust=_gemma,
    ),
    "smollm3": Family(
        **LLAMA_BIASES,
        windows="flagged",
        unrotated="listed",
        defaults={
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": Family(
        knobs=Knobs(fused=True),
        windows="all",
        partial_rotary=True,
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
    "granite": Family(
        **LLAMA_BIASES,
        defaults=dict.fromkeys(
            ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0
        ),
        adjust=_granite,
    ),
    "ministral3": Family(
        windows="all",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": MINISTRAL3_ROPE,
        },
        adjust=_ministral3,
    ),
    "olmo2": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        knobs=Knobs(norms=POST, head_norms=HeadNorms(whole=True)),
        defaults={"rms_norm_eps": 1e-5},
    ),
    "exaone4": Family(
        knobs=Knobs(norms=POST, head_norms=HeadNorms()),
        windows="typed",
        unrotated="full",
        defaults={
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
    "ernie4_5": Family(
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        knobs=Knobs(interleaved=True),
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
    ),
    "hunyuan_v1_dense": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        knobs=Knobs(
            head_norms=HeadNorms("self_attn.query_layernorm", "self_attn.key_layernorm", rotated=True)
        ),
        defaults={"rms_norm_eps": 1e-5},
    ),
    "seed_oss": Family(
        qkv_bias="attention_bias",
        output_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    ),
    "helium": Family(
        qkv_bias="attention_bias",
        mlp_bias="mlp_bias",
        knobs=Knobs(interleaved=True),
        defaults={"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 100000.0},
    ),
}

RECURRENT = (
    "the state of its recurrent layers cannot undo a rejected mask, while an attention entry is simply"
    " overwritten"
)
EXPERTS = (
    "in each step, standard operators would read all experts of a layer, or copy the selected ones, and each"
    " mask of a window selects others (docs/families.md)"
)
REORDERED = (
    "its masks are not at contiguous positions and predict their own token instead of the next one, which"
    " needs another loop, although its weights are a stock decoder's (docs/families.md)"
)
DIFFUSION = "it denoises blocks with attention in both directions, but this loop is causal (docs/families.md)"
REFUSED: Mapping[str, str] = {
    "wedlm": REORDERED,
    **dict.fromkeys(("bd3lm", "a2d-bd3lm", "llada", "llada2_moe", "dream", "fast_dllm_v2"), DIFFUSION),
    **dict.fromkeys(
        (
            "lfm2",
            "lfm2_moe",
            "qwen3_next",
            "qwen3_5",
            "qwen3_5_text",
            "qwen3_5_moe",
            "falcon_h1",
            "granitemoehybrid",
            "mamba",
            "mamba2",
            "jamba",
            "bamba",
            "zamba2",
            "nemotron_h",
            "recurrent_gemma",
            "olmo_hybrid",
        ),
        RECURRENT,
    ),
    **dict.fromkeys(
        (
            "qwen2_moe",
            "qwen3_moe",
            "mixtral",
            "gpt_oss",
            "granitemoe",
            "olmoe",
            "ernie4_5_moe",
            "hunyuan_v1_moe",
            "deepseek_v3",
            "glm4_moe",
        ),
        EXPERTS,
    ),
}
