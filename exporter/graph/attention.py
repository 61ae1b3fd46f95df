"""Attention in plain operators: for the `appended` KV layout, which every TensorRT and opset 18 have, and for
quantized graphs, whose results must not depend on the number of slots in a step.

Products with quantized weights round activations to 8 bits, and their sums do not depend on the number of
rows (int4: except for a single row). Attention is computed in floating point, and ONNX Runtime uses another
kernel for a single query row. Its last bits would change codes in the following layers, and so confidences.
Therefore no product of `batch_invariant_attention` has a single row.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from ..checkpoint.dims import Dims
from .nodes import Nodes
from .operators import attention_settings

# Scores are masked in fp32. It is finite because a Softmax of -inf alone would be NaN.
MASKED_SCORE = -1e30
# The position of an entry beyond the cursor: it is after every query, so that none attends to it. It
# fits int32, to which TensorRT may narrow integers.
NOWHERE = 2**30


def key_positions(nodes: Nodes, capacity: str, kv_length: str, positions: str) -> str:
    """Positions of all keys, [b, 1, 1, c + s]: those of the past, j for entry j if it is final, then those of
    the new entries.

    `capacity` arange [c], `kv_length` [b, 1], `positions` [b, s] of the new entries.
    """
    is_final = nodes.add("Less", capacity, kv_length, name="past_is_final")  # [b, c]
    past = nodes.add("Where", is_final, capacity, ("nowhere", NOWHERE), name="past_positions")
    keys = nodes.add("Concat", past, positions, name="key_positions_rows", axis=1)
    return nodes.add("Unsqueeze", keys, ("axes_1_2", [1, 2]), name="key_positions")


def attention_scale(nodes: Nodes, scale: float, dtype: int) -> str:
    """The factor of queries, in the graph's type."""
    return nodes.add("Cast", ("attention_scale_f32", scale, np.float32), name="attention_scale", to=dtype)


def appended_attention(
    nodes: Nodes, dims: Dims, i: int, q: str, k: str, v: str, mask: str, dtype: int
) -> str:
    """Attend over the past and then layer i's new entries k and v: [b, heads, s, d]."""
    for kind, new in (("key", k), ("value", v)):
        nodes.add("Identity", new, name=f"{kind}_new", output=f"present.{i}.{kind}")
    keys = nodes.add("Concat", f"past_key_values.{i}.key", k, name="keys", axis=2)  # [b, kv_heads, c + s, d]
    values = nodes.add("Concat", f"past_key_values.{i}.value", v, name="values", axis=2)
    return attend(nodes, dims, q, keys, values, mask, dtype)


def attend(nodes: Nodes, dims: Dims, q: str, keys: str, values: str, mask: str, dtype: int) -> str:
    """q over keys and values [b, kv_heads, entries, d] with a mask [b, 1, s, entries]: [b, heads, s, d].

    Query heads that share a key head are stacked along the slots, so that no key is copied. Softmax is in
    fp32.
    """
    grouped = nodes.constant("by_kv_head", [0, dims.num_kv_heads, -1, dims.head_dim])
    stacked = nodes.add(
        "Reshape", nodes.add("Mul", q, "attention_scale", name="q_scaled"), grouped, name="q_grouped"
    )
    turned = nodes.add("Transpose", keys, name="keys_turned", perm=[0, 1, 3, 2])
    scores = nodes.add("MatMul", stacked, turned, name="scores_grouped")  # [b, kv_heads, group * s, c + s]
    scores = nodes.add("Reshape", scores, ("scores_by_head", [0, dims.num_heads, -1, 0]), name="scores")
    if dtype != TensorProto.FLOAT:
        scores = nodes.add("Cast", scores, name="scores_f32", to=TensorProto.FLOAT)
    if dims.quirks.attention_cap:
        size = nodes.constant("attention_cap", dims.quirks.attention_cap, np.float32)
        inside = nodes.add("Div", scores, size, name="scores_inside")
        scores = nodes.add("Mul", nodes.add("Tanh", inside, name="scores_tanh"), size, name="scores_capped")
    masked = nodes.add(
        "Where", mask, scores, ("masked_score", MASKED_SCORE, np.float32), name="scores_masked"
    )
    weights = nodes.add("Softmax", masked, name="attention_weights", axis=-1)
    if dtype != TensorProto.FLOAT:
        weights = nodes.add("Cast", weights, name="attention_weights_half", to=dtype)
    weights = nodes.add(
        "Reshape", weights, ("scores_by_kv_head", [0, dims.num_kv_heads, -1, 0]), name="weights_grouped"
    )
    mixed = nodes.add("MatMul", weights, values, name="mixed_grouped")
    return nodes.add("Reshape", mixed, ("by_head", [0, dims.num_heads, -1, dims.head_dim]), name="attention")


def rms_norm(nodes: Nodes, x: str, scale: str, name: str, epsilon: float) -> str:
    """RMS norm of x over its last axis, in fp32."""
    square = nodes.add("Mul", x, x, name=f"{name}_square")
    mean = nodes.add("ReduceMean", square, ("last_axis", [-1]), name=f"{name}_mean", keepdims=1)
    safe = nodes.add("Add", mean, ("rms_epsilon", epsilon, np.float32), name=f"{name}_mean_safe")
    root = nodes.add("Sqrt", safe, name=f"{name}_root")
    return nodes.add("Mul", nodes.add("Div", x, root, name=f"{name}_unit"), scale, name=name)


# The number of slots from which each query head has its own product. With fewer slots, reading keys takes
# most of the time, and heads that share keys read them once. With more, arithmetic does, and products that
# fit in the processor's caches and divide among its cores are faster. Both give the same bits.
WIDE_SLOTS = 128
# ONNX Runtime's value for False in a mask. It absorbs any score that is added to it.
UNSEEN = float(np.finfo(np.float32).min)


def write_rows(nodes: Nodes, dims: Dims) -> None:
    """Inputs of `rows_of` and `attention`, once for all layers: the number of a product's rows for a slot."""
    groups = dims.num_heads // dims.num_kv_heads
    if groups == 1 or dims.quirks.attention_cap:
        return
    slots = nodes.add("Shape", "input_ids", name="slots_of_step", start=1, end=2)
    is_wide = nodes.add("GreaterOrEqual", slots, ("wide_slots", [WIDE_SLOTS]), name="is_wide")  # [1]
    alone = nodes.constant("one_row_a_slot", [1, 1, 1, 1])
    together = nodes.constant("heads_as_rows_of_slot", [1, 1, groups, 1])
    nodes.add("Where", is_wide, alone, together, name="rows_of_slot")
    by_head = nodes.constant("rows_as_heads", [0, dims.num_heads, -1, dims.head_dim])
    by_kv_head = nodes.constant("heads_as_rows", [0, dims.num_kv_heads, -1, dims.head_dim])
    nodes.add("Where", is_wide, by_head, by_kv_head, name="query_rows_shape")


def rows_of(nodes: Nodes, dims: Dims, mask: str) -> str:
    """The mask [b, 1, s, c] for `attention`'s query rows of s slots, as numbers to add to scores: converted
    once instead of in each layer.

    It stays boolean if scores are capped.
    """
    if dims.num_heads > dims.num_kv_heads:
        if dims.quirks.attention_cap:
            return mask
        added = _added(nodes, mask, mask)  # before Tile, which has no CUDA kernel for booleans
        return nodes.add("Tile", added, "rows_of_slot", name=f"{mask}_of_rows")
    ends = (("last_row", [-1]), ("far", [NOWHERE]))
    row = nodes.add("Slice", mask, *ends, ("axis_2", [2]), name=f"{mask}_last")
    rows = nodes.add("Concat", mask, row, name=f"{mask}_and_one", axis=2)
    return rows if dims.quirks.attention_cap else _added(nodes, rows, mask)


def _added(nodes: Nodes, rows: str, mask: str) -> str:
    return nodes.add(
        "Where", rows, ("seen", 0, np.float32), ("unseen", UNSEEN, np.float32), name=f"{mask}_added"
    )


def batch_invariant_attention(nodes: Nodes, dims: Dims, q: str, key: str, value: str, mask: str) -> str:
    """q [b, heads, s, d] over key and value [b, kv_heads, c, d] with a mask of `rows_of`: [b, heads, s, d].

    In steps of fewer than `WIDE_SLOTS` slots, heads that share a key head are rows of one product. If no
    heads share one, a row of zeros is added and removed again.
    """
    settings = attention_settings(dims.quirks)
    if dims.quirks.attention_cap:
        return _spelled(nodes, dims, q, key, value, mask)
    if dims.num_heads > dims.num_kv_heads:
        rows = nodes.add("Reshape", q, "query_rows_shape", name="query_rows")
        mixed = nodes.add("Attention", rows, key, value, mask, name="attention_of_rows", **settings)
        outside = ("rows_as_heads", [0, dims.num_heads, -1, dims.head_dim])
        return nodes.add("Reshape", mixed, outside, name="attention")
    rows = nodes.add("Pad", q, ("one_row_more", [0, 0, 0, 0, 0, 0, 1, 0]), name="query_rows")
    mixed = nodes.add("Attention", rows, key, value, mask, name="attention_of_rows", **settings)
    ends = (("first_row", [0]), ("last_row", [-1]))
    return nodes.add("Slice", mixed, *ends, ("axis_2", [2]), name="attention")


def _spelled(nodes: Nodes, dims: Dims, q: str, key: str, value: str, mask: str) -> str:
    """The same in plain operators, which already stack heads that share a key head."""
    if dims.num_heads > dims.num_kv_heads:
        return attend(nodes, dims, q, key, value, mask, TensorProto.FLOAT)
    rows = nodes.add("Pad", q, ("one_row_more", [0, 0, 0, 0, 0, 0, 1, 0]), name="query_rows")
    mixed = attend(nodes, dims, rows, key, value, mask, TensorProto.FLOAT)
    ends = (("first_row", [0]), ("last_row", [-1]))
    return nodes.add("Slice", mixed, *ends, ("axis_2", [2]), name="attention_cut")
