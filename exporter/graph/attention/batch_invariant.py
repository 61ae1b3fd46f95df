"""Attention whose results do not depend on the number of slots in a step, for quantized graphs.

Products with quantized weights round activations to 8 bits, and their sums do not depend on the number of
rows (int4: except for a single row). Attention is computed in floating point, and ONNX Runtime uses another
kernel for a single query row. Its last bits would change codes in the following layers, and so confidences.
Therefore no product has a single row here.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from ...checkpoint.architecture.dims import Dims
from ..nodes import Nodes
from ..scaling import attention_settings
from .appended import attend

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
    ends = (("last_row", [-1]), ("far", [2**62]))
    row = nodes.add("Slice", mask, *ends, ("axis_2", [2]), name=f"{mask}_last")
    rows = nodes.add("Concat", mask, row, name=f"{mask}_and_one", axis=2)
    return rows if dims.quirks.attention_cap else _added(nodes, rows, mask)


def _added(nodes: Nodes, rows: str, mask: str) -> str:
    return nodes.add(
        "Where", rows, ("seen", 0, np.float32), ("unseen", UNSEEN, np.float32), name=f"{mask}_added"
    )


def attention(nodes: Nodes, dims: Dims, q: str, key: str, value: str, mask: str) -> str:
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
