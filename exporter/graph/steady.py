"""Attention whose numbers do not depend on how many slots a step has, for graphs of which all else is so
already.

With 8-bit activations every product is a sum of integers, the same however many rows there are. Attention
alone is computed in floating point, and ONNX Runtime takes another kernel for a single query row: its last
bits move codes of the following layers, and so confidences. Here no product has a single row. Knows one
operator.
"""

from __future__ import annotations

from onnx import TensorProto

from ..checkpoint.family import Dims
from .delta import attend
from .knobs import attention_settings
from .nodes import Nodes


def rows_of(nodes: Nodes, dims: Dims, mask: str) -> str:
    """The mask [b, 1, s, c] for the query rows that `attention` makes of s slots."""
    groups = dims.num_heads // dims.num_kv_heads
    if groups > 1 and dims.knobs.attention_cap:
        return mask
    if groups > 1:
        return nodes.add("Concat", *[mask] * groups, name=f"{mask}_of_groups", axis=2)
    last = nodes.constant("last_row", [-1])
    row = nodes.add(
        "Slice",
        mask,
        last,
        nodes.constant("far", [2**62]),
        nodes.constant("axis_2", [2]),
        name=f"{mask}_last",
    )
    return nodes.add("Concat", mask, row, name=f"{mask}_and_one", axis=2)


def attention(nodes: Nodes, dims: Dims, q: str, key: str, value: str, mask: str) -> str:
    """q [b, heads, s, d] over key and value [b, kv_heads, c, d] with a mask of `rows_of`: [b, heads, s, d].

    Heads that share a key head are rows of one product. Where none do, a row of zeros is added and cut off.
    """
    settings = attention_settings(dims.knobs)
    if dims.knobs.attention_cap:
        return _spelled(nodes, dims, q, key, value, mask)
    if dims.num_heads > dims.num_kv_heads:
        inside = nodes.constant("heads_as_rows", [0, dims.num_kv_heads, -1, dims.head_dim])
        outside = nodes.constant("rows_as_heads", [0, dims.num_heads, -1, dims.head_dim])
        rows = nodes.add("Reshape", q, inside, name="query_rows")
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
