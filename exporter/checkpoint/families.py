"""The table of decoder families, and the quirks in which they differ from Llama.

A family is data, and a short function if numbers come from the config. The graph, the reference and the table
of tensors read its quirks, so that none of these depends on a family by name. The families that are refused
are listed with their reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...runtime.errors import CheckpointError
from . import names


@dataclass(frozen=True, slots=True)
class Norms:
    """The names of a layer's norms in a checkpoint; None for a norm that the layer does not have."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


PRE = Norms(names.INPUT_NORM, None, names.POST_NORM, None)  # Llama's
POST = Norms(None, names.POST_NORM, None, names.POST_MLP_NORM)
SANDWICH = Norms(names.INPUT_NORM, names.POST_NORM, names.PRE_MLP_NORM, names.POST_MLP_NORM)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of queries and keys, by their names in a checkpoint.

    `whole`: over all heads together instead of each. `rotated`: after the rotary embedding, not before.
    """

    q: str = names.Q_NORM
    k: str = names.K_NORM
    whole: bool = False
    rotated: bool = False


@dataclass(frozen=True, slots=True)
class Quirks:
    """One setting of every quirk; the defaults are Llama's.

    A cap c turns x into c tanh(x / c); 0 is off. Factors are scalars of the graph, never folded into a table.
    """

    norms: Norms = PRE
    head_norms: HeadNorms | None = None
    norm_offset: float = 0.0  # added to the stored scale of every norm
    activation: str = "silu"  # or "gelu_tanh"
    fused: bool = False  # q, k and v are stored as one map, and so are gate and up
    interleaved: bool = False  # rotary pairs are neighbours instead of halves
    output_gate: bool = False  # q_proj also makes a gate of what each query head mixes, after its queries
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_cap: float = 0.0  # of scores, before the mask
    # (beta, n): queries at position p are multiplied by 1 + beta log(1 + floor(p / n))
    query_growth: tuple[float, int] | None = None
    embedding_factor: float = 1.0
    residual_factor: float = 1.0  # of what attention and MLP add
    logit_factor: float = 1.0
    logit_cap: float = 0.0

    @property
    def qkv(self) -> tuple[str, ...]:
        """The stored maps that make queries, keys and values, in this order."""
        return (names.QKV,) if self.fused else (names.Q, names.K, names.V)

    @property
    def gate_up(self) -> tuple[str, ...]:
        """The stored maps that make gate and up, in this order."""
        return (names.GATE_UP,) if self.fused else (names.GATE, names.UP)


@dataclass(frozen=True, slots=True)
class Mtp:
    """A layer for multi-token prediction, by the names in a checkpoint: its prefix `layer`, the norms of its
    two inputs, the map `fused` of both, and the norm before lm_head.

    `reads_normed`: it reads hidden states after the last norm, not before. `token_first`: the token comes
    before the hidden state in the input of `fused`. `sees_first`: the layer sees a token at the first
    position. `drafts`: the tokens that it proposes in a step by default.
    """

    layer: str
    hidden: str
    token: str
    fused: str
    final: str
    reads_normed: bool = False
    token_first: bool = False
    sees_first: bool = False
    drafts: int = 1


MIMO_MTP = Mtp(
    layer="model.mtp_layers.0.",
    hidden="model.mtp_layers.0.hidden_layernorm.weight",
    token="model.mtp_layers.0.token_layernorm.weight",
    fused="model.mtp_layers.0.input_proj.weight",
    final="model.mtp_layers.0.final_layernorm.weight",
)
# By vLLM's qwen3_5_mtp.py; llama.cpp #24025 and LightLLM #1402 measured that it reads normed states.
QWEN_MTP = Mtp(
    layer="mtp.layers.0.",
    hidden="mtp.pre_fc_norm_hidden.weight",
    token="mtp.pre_fc_norm_embedding.weight",
    fused="mtp.fc.weight",
    final="mtp.norm.weight",
    reads_normed=True,
    token_first=True,
    sees_first=True,
    drafts=3,
)

SILU, GELU_TANH = "silu", "gelu_tanh"
ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH}


@dataclass(frozen=True, slots=True)
class Family:
    """How a decoder family differs from Llama.

    A bias is True, False, or the config field that decides. `windows` are the layers with sliding windows:
    "no layer"; "all" if the config has a window; "typed" by the config's `layer_types`. `unrotated` are the
    layers without a rotary embedding: "no layer"; "listed" by `no_rope_layers`; "full" are those with full
    attention, if others slide. `rope_by_kind`: sliding layers have separate frequencies. `recurrent`: layers
    that are not full attention by `layer_types` are gated delta nets. `adjust` reads quirks from
    transformers' config.
    """

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    quirks: Quirks = field(default_factory=Quirks)
    activation_field: str = "hidden_act"
    windows: str = "no layer"
    unrotated: str = "no layer"
    partial_rotary: bool = False
    recurrent: bool = False
    rope_by_kind: bool = False
    adjust: Callable[[Quirks, Any], Quirks] | None = None

    def quirks_of(self, config: Any) -> Quirks:
        """The family's quirks with what the config sets."""
        activation = str(getattr(config, self.activation_field))
        if ACTIVATIONS.get(activation) != self.quirks.activation:
            known = [name for name, kind in ACTIVATIONS.items() if kind == self.quirks.activation]
            raise CheckpointError(
                f"config.json: {self.activation_field} `{activation[:80]}` is not supported"
                f" (known: {', '.join(known)})"
            )
        return self.quirks if self.adjust is None else self.adjust(self.quirks, config)


def has_bias(which: bool | str, config: Any) -> bool:
    return which if isinstance(which, bool) else bool(getattr(config, which))


def _granite(quirks: Quirks, config: Any) -> Quirks:
    return replace(
        quirks,
        attention_scale=float(config.attention_multiplier),
        embedding_factor=float(config.embedding_multiplier),
        residual_factor=float(config.residual_multiplier),
        logit_factor=1 / float(config.logits_scaling),
    )


def _gemma(quirks: Quirks, config: Any) -> Quirks:
    if getattr(config, "use_bidirectional_attention", False):
        raise CheckpointError(
            "config.json: `use_bidirectional_attention` makes this an encoder; a causal decoder is expected"
        )
    return replace(
        quirks,
        attention_scale=float(config.query_pre_attn_scalar**-0.5),
        embedding_factor=config.hidden_size**0.5,
        logit_cap=float(config.final_logit_softcapping or 0),
    )


def _gemma2(quirks: Quirks, config: Any) -> Quirks:
    return replace(_gemma(quirks, config), attention_cap=float(config.attn_logit_softcapping or 0))


def _ministral3(quirks: Quirks, config: Any) -> Quirks:
    params = config.rope_parameters
    if params.get("llama_4_scaling_beta") is None:
        return quirks
    growth = float(params["llama_4_scaling_beta"]), int(params["original_max_position_embeddings"])
    return replace(quirks, query_growth=growth)


ATTENTION_BIASES: dict[str, Any] = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
LLAMA_BIASES: dict[str, Any] = ATTENTION_BIASES | {"mlp_bias": "mlp_bias"}
GEMMA = Quirks(norms=SANDWICH, norm_offset=1.0, activation=GELU_TANH)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(**LLAMA_BIASES),
    "mistral": Family(windows="all"),
    "qwen2": Family(qkv_bias=True, windows="typed"),
    "qwen3": Family(**ATTENTION_BIASES, quirks=Quirks(head_norms=HeadNorms()), windows="typed"),
    "gemma2": Family(
        **ATTENTION_BIASES,
        quirks=GEMMA,
        activation_field="hidden_activation",
        windows="typed",
        adjust=_gemma2,
    ),
    "gemma3_text": Family(
        **ATTENTION_BIASES,
        quirks=replace(GEMMA, head_norms=HeadNorms()),
        activation_field="hidden_activation",
        windows="typed",
        rope_by_kind=True,
        adjust=_gemma,
    ),
    "qwen3_5_text": Family(
        **ATTENTION_BIASES,
        quirks=Quirks(head_norms=HeadNorms(), norm_offset=1.0, output_gate=True),
        partial_rotary=True,
        recurrent=True,
    ),
    "smollm3": Family(**LLAMA_BIASES, windows="typed", unrotated="listed"),
    "phi3": Family(quirks=Quirks(fused=True), windows="all", partial_rotary=True),
    "granite": Family(**LLAMA_BIASES, adjust=_granite),
    "ministral3": Family(windows="all", adjust=_ministral3),
    "olmo2": Family(**ATTENTION_BIASES, quirks=Quirks(norms=POST, head_norms=HeadNorms(whole=True))),
    "exaone4": Family(quirks=Quirks(norms=POST, head_norms=HeadNorms()), windows="typed", unrotated="full"),
    "ernie4_5": Family(
        qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", quirks=Quirks(interleaved=True)
    ),
    "hunyuan_v1_dense": Family(
        **ATTENTION_BIASES,
        quirks=Quirks(
            head_norms=HeadNorms("self_attn.query_layernorm", "self_attn.key_layernorm", rotated=True)
        ),
    ),
    "seed_oss": Family(qkv_bias="attention_bias", output_bias="attention_out_bias", mlp_bias="mlp_bias"),
    "helium": Family(qkv_bias="attention_bias", mlp_bias="mlp_bias", quirks=Quirks(interleaved=True)),
}

RECURRENT = "its recurrent layers are of another kind than Qwen3.5's (docs/families.md)"
EXPERTS = (
    "in each step, standard operators would read all experts of a layer, or copy the selected ones, and each"
    " mask of a window selects others (docs/families.md)"
)
REORDERED = (
    "its masks are not at contiguous positions and predict their own token instead of the next one, which"
    " needs another loop, although its weights are a stock decoder's (docs/families.md)"
)
DIFFUSION = "it denoises blocks with attention in both directions, but this loop is causal (docs/families.md)"
REFUSED: Mapping[str, tuple[str, ...]] = {
    REORDERED: ("wedlm",),
    DIFFUSION: ("bd3lm", "a2d-bd3lm", "llada", "llada2_moe", "dream", "fast_dllm_v2"),
    RECURRENT: ("lfm2", "qwen3_next", "falcon_h1", "granitemoehybrid", "mamba", "mamba2"),
    EXPERTS: ("qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "granitemoe", "olmoe", "deepseek_v3"),
}


def refusal(model_type: str) -> str | None:
    """Why this loop cannot run an architecture that is known to be of another kind."""
    return next((reason for reason, names in REFUSED.items() if model_type in names), None)
