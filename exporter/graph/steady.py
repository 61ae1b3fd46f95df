"""Attention whose numbers do not depend on how many slots a step has, for graphs of which all else is so
already.

Products with quantized weights round activations to 8 bits, and their sums are the same however many rows
there are (int4: but for one row alone). Attention is computed in floating point, and ONNX Runtime takes
another kernel for a single query row: its last bits move codes of the following layers, and so confidences.
Here no product has a single row. Knows one operator.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from ..checkpoint.family import Dims
from .delta import attend
from .knobs import attention_settings
from .nodes import Nodes

# Slots from which each query head has a product of its own. Fewer are bound by reading keys, which heads
# that share them then read once; more by arithmetic, where products that stay in the processor's caches and
# that divide among its cores are the faster ones. Both give the same bits (docs/archive.md).
WIDE_SLOTS = 128
# What ONNX Runtime itself makes of False in a mask; adding any score to it changes nothing.
UNSEEN = float(np.finfo(np.float32).min)


def write_rows(nodes: Nodes, dims: Dims) -> None:
    """What `rows_of` and `attention` need, once for all layers: how many rows of a product a slot has."""
    groups = dims.num_heads // dims.num_kv_heads
    if groups == 1 or dims.knobs.attention_cap:
        return
    slots = nodes.add("Shape", "input_ids", name="slots_of_step", start=1, end=2)
    is_wide = nodes.add(
        "GreaterOrEqual", slots, nodes.constant("wide_slots", [WIDE_SLOTS]), name="is_wide"
    )  # [1]
    alone = nodes.constant("one_row_a_slot", [1, 1, 1, 1])
    together = nodes.constant("heads_as_rows_of_slot", [1, 1, groups, 1])
    nodes.add("Where", is_wide, alone, together, name="rows_of_slot")
    by_head = nodes.constant("rows_as_heads", [0, dims.num_heads, -1, dims.head_dim])
    by_kv_head = nodes.constant("heads_as_rows", [0, dims.num_kv_heads, -1, dims.head_dim])
    nodes.add("Where", is_wide, by_head, by_kv_head, name="query_rows_shape")


def rows_of(nodes: Nodes, dims: Dims, mask: str) -> str:
    """The mask [b, 1, s, c] for the query rows that `attention` makes of s slots, as what is added to scores:
    once for all layers, each of which would make it of truths.

    Of truths still where scores are capped.
    """
    if dims.num_heads > dims.num_kv_heads:
        if dims.knobs.attention_cap:
            return mask
        rows = nodes.add("Tile", mask, "rows_of_slot", name=f"{mask}_of_rows")
        return _added(nodes, rows, mask)
    last = nodes.constant("last_row", [-1])
    row = nodes.add(
        "Slice",
        mask,
        last,
        nodes.constant("far", [2**62]),
        nodes.constant("axis_2", [2]),
        name=f"{mask}_last",
    )
    rows = nodes.add("Concat", mask, row, name=f"{mask}_and_one", axis=2)
    return rows if dims.knobs.attention_cap else _added(nodes, rows, mask)


def _added(nodes: Nodes, rows: str, mask: str) -> str:
    seen = nodes.constant("seen", 0, np.float32)
    unseen = nodes.constant("unseen", UNSEEN, np.float32)
    return nodes.add("Where", rows, seen, unseen, name=f"{mask}_added")


def attention(nodes: Nodes, dims: Dims, q: str, key: str, value: str, mask: str) -> str:
    """q [b, heads, s, d] over key and value [b, kv_heads, c, d] with a mask of `rows_of`: [b, heads, s, d].

    Heads that share a key head are rows of one product in steps of fewer than `WIDE_SLOTS`. Where none do, a
    row of zeros is added and cut off.
    """
    settings = attention_settings(dims.knobs)
    if dims.knobs.attention_cap:
        return _spelled(nodes, dims, q, key, value, mask)
    if dims.num_heads > dims.num_kv_heads:
        outside = nodes.constant("rows_as_heads", [0, dims.num_heads, -1, dims.head_dim])
        rows = nodes.add("Reshape", q, "query_rows_shape", name="query_rows")
        mixed = nodes.add("Attention", rows, key, value, mask, name="attention_of_rows", **settings)
        return nodes.add("Reshape", mixed, outside, name="attention")
    pads = nodes.constant("one_row_more", [0, 0, 0, 0, 0, 0, 1, 0])
    rows = nodes.add("Pad", q, pads, name="query_rows")
    mixed = nodes.add("Attention", rows, key, value, mask, name="attention_of_rows", **settings)
    ends = (nodes.constant("first_row", [0]), nodes.constant("last_row", [-1]))
    return nodes.add("Slice", mixed, *ends, nodes.constant("axis_2", [2]), name="attention")


def _spelled(nodes: Nodes, dims: Dims, q: str, key: str, value: str, mask: str) -> str:
    """The same in plain operators, which stack heads that share a key head themselves."""
    if dims.num_heads > dims.num_kv_heads:
        return attend(nodes, dims, q, key, value, mask, TensorProto.FLOAT)
    pads = nodes.constant("one_row_more", [0, 0, 0, 0, 0, 0, 1, 0])
    rows = nodes.add("Pad", q, pads, name="query_rows")
    mixed = attend(nodes, dims, rows, key, value, mask, TensorProto.FLOAT)
    ends = (nodes.constant("first_row", [0]), nodes.constant("last_row", [-1]))
    return nodes.add("Slice", mixed, *ends, nodes.constant("axis_2", [2]), name="attention_cut")
