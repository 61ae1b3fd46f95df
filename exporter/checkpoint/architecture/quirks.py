"""The differences between decoders as quirks, with Llama as the default.

Families set quirks (families.py). The graph, the reference and the table of tensors read them, so that none
of these depends on a family by name.
"""

from __future__ import annotations

from dataclasses import dataclass

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
