"""The names of a stock decoder's tensors in a checkpoint."""

from __future__ import annotations

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
ROTARY_COPY = "rotary_emb.inv_freq"  # old checkpoints store the rotary frequencies: a copy, not a weight

# Parts of a layer.
Q, K, V, O = (f"self_attn.{letter}_proj" for letter in "qkvo")  # noqa: E741
Q_NORM, K_NORM = "self_attn.q_norm", "self_attn.k_norm"
GATE, UP, DOWN = "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"  # stored as one map
# Of a recurrent layer, in place of attention. The maps of its input: queries, keys and values, the gate of
# its output, decays, and rates of change.
RECURRENT_IN = tuple(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "a", "b"))
RECURRENT_OUT, CONVOLUTION, RECURRENT_NORM = (
    f"linear_attn.{name}" for name in ("out_proj", "conv1d", "norm")
)
DECAY, DECAY_BIAS = "linear_attn.A_log", "linear_attn.dt_bias"  # without the suffix `.weight`
INPUT_NORM, POST_NORM = "input_layernorm", "post_attention_layernorm"
PRE_MLP_NORM, POST_MLP_NORM = "pre_feedforward_layernorm", "post_feedforward_layernorm"
PLAIN = "plain:"  # before the name of a norm: as it is stored, where a rotation makes it one
MTP_HEAD = "mtp_head"  # the table that rotated MTP layers propose tokens with
LINEARS = (Q, K, V, O, GATE, UP, DOWN, QKV, GATE_UP, *RECURRENT_IN, RECURRENT_OUT)


def layer(i: int) -> str:
    """The prefix of the names of layer i."""
    return f"model.layers.{i}."


def weight(i: int, part: str) -> str:
    return f"{layer(i)}{part}.weight"


def bias(i: int, part: str) -> str:
    return f"{layer(i)}{part}.bias"


def is_linear(name: str) -> bool:
    """Whether `name` is the weight of a Linear map of a layer."""
    return name.endswith(tuple(f".{part}.weight" for part in LINEARS))
