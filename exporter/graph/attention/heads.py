"""Splits the packed product of q, k and v into heads, with the norms and rotations that the quirks set."""

from __future__ import annotations

from collections.abc import Callable

from ...checkpoint.architecture.dims import Dims
from ..nodes import Nodes
from . import rotary

Norm = Callable[[str, str, str], str]
"""Called with a value, a module and a name: the norm of the value by the weight `layers.{i}.{module}`."""


def split_heads(
    nodes: Nodes, dims: Dims, i: int, packed: str, norm: Norm, is_appended: bool
) -> tuple[str, str, str]:
    """Packed [b, s, (heads + 2 kv_heads) d] -> q [b, heads, s, d], k and v [b, kv_heads, s, d] of layer i,
    ready for attention.
    """
    norms, counts = dims.quirks.head_norms, [dims.num_heads, dims.num_kv_heads, dims.num_kv_heads]

    def normed(q: str, k: str) -> tuple[str, str]:
        return norm(q, "q_norm", "q_normed"), norm(k, "k_norm", "k_normed")

    def rotated(x: str, name: str) -> str:
        return rotary.rotate(nodes, dims, i, x, f"{name}_rotated", is_appended)

    if norms is not None and norms.whole:
        flat = ("qkv_flat_sizes", [count * dims.head_dim for count in counts])
        q, k, v = nodes.split(packed, flat, ("q_flat", "k_flat", "v_flat"), "qkv_split")
        q, k = normed(q, k)
        q, k, v = (_heads(nodes, dims, x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
        return rotated(q, "q"), rotated(k, "k"), v
    stacked = _heads(nodes, dims, packed, "qkv")
    if norms is not None and not norms.rotated:
        q, k, v = nodes.split(stacked, ("qkv_sizes", counts), "qkv", "qkv_split", axis=1)
        q, k = normed(q, k)
        return rotated(q, "q"), rotated(k, "k"), v
    sizes = ("qk_v_sizes", [dims.num_heads + dims.num_kv_heads, dims.num_kv_heads])
    qk, v = nodes.split(stacked, sizes, ("qk", "v"), "qkv_split", axis=1)
    two = nodes.constant("q_k_sizes", [dims.num_heads, dims.num_kv_heads])
    q, k = nodes.split(rotated(qk, "qk"), two, ("q", "k"), "qk_split", axis=1)
    if norms is not None:
        q, k = normed(q, k)
    return q, k, v


def _heads(nodes: Nodes, dims: Dims, x: str, name: str) -> str:
    """[b, s, heads d] -> [b, heads, s, d]."""
    total = dims.num_heads + 2 * dims.num_kv_heads
    count, constant = (total, "split_heads") if name == "qkv" else (-1, "split_any_heads")
    split = nodes.add("Reshape", x, (constant, [0, 0, count, dims.head_dim]), name=f"{name}_heads")
    return nodes.add("Transpose", split, name=f"{name}_stacked", perm=[0, 2, 1, 3])
