"""Splits the packed product of q, k and v into heads, with the norms and rotations that the quirks set.

Cos and sin are computed once for all layers. The `in-place` and `cuda` layouts use the operator
RotaryEmbedding, `appended` plain operators. Pairs are halves or neighbours; whole heads or their first part
are rotated, by one set of frequencies or two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto

from ..checkpoint.dims import Dims
from ..checkpoint.stock import Rope
from .nodes import Nodes


def _suffix(which: int) -> str:
    return f"_{which}" if which else ""


def write_angles(nodes: Nodes, dims: Dims, positions: str, dtype: int, is_appended: bool) -> None:
    """`cos` and `sin` [b, s, rotary / 2] (`cos_1`, `sin_1` of the second frequencies) for `positions`
    [b, s].
    """
    used = sorted({which for which in dims.rotation if which is not None})
    if not used:
        return
    column = nodes.add(
        "Unsqueeze",
        nodes.add("Cast", positions, name="positions_f32", to=TensorProto.FLOAT),
        ("axis_2", [2]),
        name="positions_last",
    )
    for which in used:
        _write_angles(nodes, dims.ropes[which], column, _suffix(which), dtype)
        if is_appended:
            _write_rows(nodes, dims, which)


def _write_angles(nodes: Nodes, rope: Rope, column: str, suffix: str, dtype: int) -> None:
    frequencies = (f"inv_freq{suffix}", rope.inv_freq, np.float32)
    angles = nodes.add("Mul", column, frequencies, name=f"angles{suffix}")  # [b, s, d/2]
    for name, op in ((f"cos{suffix}", "Cos"), (f"sin{suffix}", "Sin")):
        value = nodes.add(op, angles, name=f"{name}_raw")
        if rope.scale != 1.0:
            scale = (f"rope_scale{suffix}", rope.scale, np.float32)
            value = nodes.add("Mul", value, scale, name=f"{name}_scaled")
        nodes.add("Cast", value, name=name, to=dtype)


def _write_rows(nodes: Nodes, dims: Dims, which: int) -> None:
    """Inputs of `_rotated`: `cos` and `sin` with an axis for the heads, and one for a pair's other half."""
    axes = ("axes_1_4", [1, 4]) if dims.quirks.interleaved else ("axis_1", [1])
    for value in (f"cos{_suffix(which)}", f"sin{_suffix(which)}"):
        nodes.add("Unsqueeze", value, axes, name=f"{value}_rows")


def angles(dims: Dims, layer: int) -> tuple[str, str]:
    """The names of cos and sin for layer `layer`, which has a rotation."""
    which = dims.rotation[layer]
    assert which is not None
    return f"cos{_suffix(which)}", f"sin{_suffix(which)}"


def rotate(
    nodes: Nodes, dims: Dims, layer: int, x: str, name: str, is_appended: bool, num_heads: int = 0
) -> str:
    """x [b, heads, s, d], or [b, s, heads d] with its `num_heads`, with layer `layer`'s rotation; x itself if
    the layer has none.
    """
    which, rope = dims.rotation[layer], dims.rope(layer)
    if which is None or rope is None:
        return x
    size = 2 * len(rope.inv_freq)
    if not is_appended:
        settings: dict[str, Any] = {"interleaved": 1} if dims.quirks.interleaved else {}
        settings |= {"rotary_embedding_dim": size} if size != dims.head_dim else {}
        settings |= {"num_heads": num_heads} if num_heads else {}
        return nodes.add("RotaryEmbedding", x, *angles(dims, layer), name=name, **settings)
    if size == dims.head_dim:
        return _rotated(nodes, dims, x, which, size, name)
    sizes = ("rotary_and_rest", [size, dims.head_dim - size])
    turning, rest = nodes.split(x, sizes, (f"{name}_turning", f"{name}_rest"), f"{name}_parts")
    rotated = _rotated(nodes, dims, turning, which, size, f"{name}_turned")
    return nodes.add("Concat", rotated, rest, name=name, axis=-1)


def _rotated(nodes: Nodes, dims: Dims, x: str, which: int, size: int, name: str) -> str:
    """All `size` numbers of each head of x, in plain operators."""
    sizes = ("half_head_sizes", [size // 2] * 2)
    if dims.quirks.interleaved:
        x = nodes.add("Reshape", x, ("rotary_pairs", [0, 0, 0, size // 2, 2]), name=f"{name}_pairs")
        sizes = ("one_and_one", [1, 1])
    first, second = nodes.split(x, sizes, (f"{name}_first", f"{name}_second"), f"{name}_split")

    def rotated(a: str, b: str, op: str, part: str) -> str:
        along = nodes.add("Mul", a, f"cos{_suffix(which)}_rows", name=f"{name}_{part}_cos")
        across = nodes.add("Mul", b, f"sin{_suffix(which)}_rows", name=f"{name}_{part}_sin")
        return nodes.add(op, along, across, name=f"{name}_{part}_turned")

    both = (rotated(first, second, "Sub", "first"), rotated(second, first, "Add", "second"))
    if not dims.quirks.interleaved:
        return nodes.add("Concat", *both, name=name, axis=-1)
    joined = nodes.add("Concat", *both, name=f"{name}_joined", axis=-1)
    return nodes.add("Reshape", joined, ("rotary_flat", [0, 0, 0, size]), name=name)


Norm = Callable[[str, str, str], str]
"""Called with a value, a module and a name: the norm of the value by the weight `layers.{i}.{module}`."""


def split_gate(nodes: Nodes, dims: Dims, packed: str) -> tuple[str, str]:
    """The packed product without the gates that follow each head's queries, and the gates [b, s, heads d]."""
    heads, d = dims.num_heads, dims.head_dim
    rest = ("gated_and_rest", [2 * heads * d, 2 * dims.num_kv_heads * d])
    gated, kv = nodes.split(packed, rest, ("q_gate", "kv"), "packed_split")
    gated = nodes.add("Reshape", gated, ("gated_heads", [0, 0, heads, 2 * d]), name="q_gate_heads")
    q, gate = nodes.split(gated, ("q_and_gate", [d, d]), ("q_heads", "gate_heads"), "q_gate_split")
    flat = ("flat_queries", [0, 0, heads * d])
    gate = nodes.add("Reshape", gate, flat, name="output_gate")
    return nodes.add(
        "Concat", nodes.add("Reshape", q, flat, name="q_flat"), kv, name="qkv_alone", axis=-1
    ), gate


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
        return rotate(nodes, dims, i, x, f"{name}_rotated", is_appended)

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


def flat_heads(nodes: Nodes, dims: Dims, i: int, packed: str, norm: Norm) -> tuple[str, str, str]:
    """The same for the `cuda` layout: q [b, s, heads d], k and v [b, s, kv_heads d].

    Parts are cut by Slice, because CUDA's Split copies unequal sizes from the host in every step, and a
    captured step would replay the copy. Slices of values name the axis of slots, too, or ONNX Runtime would
    join the three in a Split. Queries and keys turn in one node, and values beside them.
    """
    norms, heads, kv_heads = dims.quirks.head_norms, dims.num_heads, dims.num_kv_heads
    ends = [nodes.constant(f"head_{at}", [at * dims.head_dim]) for at in (0, heads, heads + kv_heads)]

    def part(x: str, name: str, at: int) -> str:
        return nodes.add("Slice", x, ends[at], ends[at + 1], ("last_axis", [-1]), name=name)

    def values() -> str:
        start, end = ("slot_0_values", [0, (heads + kv_heads) * dims.head_dim]), ("far", [2**62] * 2)
        return nodes.add("Slice", packed, start, end, ("axes_1_2", [1, 2]), name="v")

    def rotated(x: str, name: str, count: int) -> str:
        return rotate(nodes, dims, i, x, f"{name}_rotated", False, count)

    if norms is not None and norms.whole:
        q, k = (
            norm(part(packed, "q", 0), "q_norm", "q_normed"),
            norm(part(packed, "k", 1), "k_norm", "k_normed"),
        )
        return rotated(q, "q", heads), rotated(k, "k", kv_heads), values()
    turned = packed
    if norms is not None and not norms.rotated:
        turned = _norms_of_heads(nodes, dims, i, turned, norm)
    turned = rotated(turned, "qkv", heads + 2 * kv_heads)
    if norms is not None and norms.rotated:
        turned = _norms_of_heads(nodes, dims, i, turned, norm)
    return part(turned, "q", 0), part(turned, "k", 1), values()


def _norms_of_heads(nodes: Nodes, dims: Dims, i: int, packed: str, norm: Norm) -> str:
    """The norms of queries and keys in one node whose scale has a row for each head. CUDA takes such a scale
    [1, heads, d] with three axes only. Values are normalized, too, and not used.
    """
    count, scale = dims.num_heads + 2 * dims.num_kv_heads, f"layers.{i}.qk_norm.weight"
    rows = [
        nodes.add(
            "Expand", f"layers.{i}.{which}_norm.weight", (f"scales_of_{which}", shape), name=f"{which}_scale"
        )
        for which, shape in (("q", [1, dims.num_heads, 1]), ("k", [1, 2 * dims.num_kv_heads, 1]))
    ]
    nodes.add("Concat", *rows, name="qk_scale", output=scale, axis=1)  # constant: computed at loading
    by_head = nodes.add("Reshape", packed, ("heads_alone", [-1, count, dims.head_dim]), name="qkv_heads")
    return nodes.add(
        "Reshape", norm(by_head, "qk_norm", "qkv_normed"), "packed_shape", name="qkv_normed_flat"
    )


def _heads(nodes: Nodes, dims: Dims, x: str, name: str) -> str:
    """[b, s, heads d] -> [b, heads, s, d]."""
    total = dims.num_heads + 2 * dims.num_kv_heads
    count, constant = (total, "split_heads") if name == "qkv" else (-1, "split_any_heads")
    split = nodes.add("Reshape", x, (constant, [0, 0, count, dims.head_dim]), name=f"{name}_heads")
    return nodes.add("Transpose", split, name=f"{name}_stacked", perm=[0, 2, 1, 3])
