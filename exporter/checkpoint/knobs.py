"""What a decoder may do otherwise than Llama does: the knobs that the graph, the reference and the table of
tensors read.

A family sets some of them (families.py); who writes a layer reads all of them, and knows no family by name.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from . import names


@dataclass(frozen=True, slots=True)
class Norms:
    """What a layer's norms are called in a checkpoint; None where there is none."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


PRE = Norms(names.INPUT_NORM, None, names.POST_NORM, None)  # Llama's
BEHIND = Norms(None, names.POST_NORM, None, names.POST_MLP_NORM)
SANDWICH = Norms(names.INPUT_NORM, names.POST_NORM, names.PRE_MLP_NORM, names.POST_MLP_NORM)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of queries and keys, by their names in a checkpoint.

    `whole`: over all heads together, not over each alone. `rotated`: behind the rotary embedding, not before.
    """

    q: str = names.Q_NORM
    k: str = names.K_NORM
    whole: bool = False
    rotated: bool = False


@dataclass(frozen=True, slots=True)
class Knobs:
    """One setting of every knob; the defaults are Llama's.

    `norm_offset` is added to the stored scale of every norm. `fused`: q, k and v, and gate and up, are stored
    as one map each. `interleaved`: rotary pairs are neighbours, not halves. `query_growth` (beta, n): queries
    at position p are multiplied by 1 + beta log(1 + floor(p / n)). A cap c makes x to c tanh(x / c): of
    attention scores before the mask, of logits at the end; 0 is off. Factors are scalars of the graph, never
    folded into a table.
    """

    norms: Norms = PRE
    head_norms: HeadNorms | None = None
    norm_offset: float = 0.0
    activation: str = "silu"  # or "gelu_tanh"
    fused: bool = False
    interleaved: bool = False
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_cap: float = 0.0
    query_growth: tuple[float, int] | None = None
    embedding_factor: float = 1.0
    residual_factor: float = 1.0  # of what attention and MLP add
    logit_factor: float = 1.0
    logit_cap: float = 0.0

    @property
    def turned(self) -> frozenset[str]:
        """The names of knobs that are set otherwise than Llama's."""
        usual = Knobs()
        return frozenset(f.name for f in fields(self) if getattr(self, f.name) != getattr(usual, f.name))

    @property
    def qkv(self) -> tuple[str, ...]:
        """The stored maps that make queries, keys and values, in this order."""
        return (names.QKV,) if self.fused else (names.Q, names.K, names.V)

    @property
    def gate_up(self) -> tuple[str, ...]:
        """The stored maps that make gate and up, in this order."""
        return (names.GATE_UP,) if self.fused else (names.GATE, names.UP)
