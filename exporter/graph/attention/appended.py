"""Attention and norms of the `appended` KV layout, in plain operators that every TensorRT and opset 18
have.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from ...checkpoint.architecture.dims import Dims
from ..nodes import Nodes

# Scores are masked in fp32. It is finite because a Softmax of -inf alone would be NaN.
MASKED_SCORE = -1e30
# The position of an entry beyond the cursor: it is after every query, so that none attends to it.
NOWHERE = 2**40


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


def attention(nodes: Nodes, dims: Dims, i: int, q: str, k: str, v: str, mask: str, dtype: int) -> str:
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
