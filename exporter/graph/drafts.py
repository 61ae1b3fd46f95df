"""Writes what draft adapters add to the products of a step, for its draft slots: (x A, 0 for other owners) B.

Shapes in comments: b rows, s slots, n draft slots of all rows, r ranks of all adapters of a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx import helper

from .nodes import Nodes

SLOTS, IS_DRAFT = "draft_slots", "is_draft"
LARGEST = 1e4  # of a draft slot's keys and values in half precision


def write_owners(nodes: Nodes, vocab_size: int, several: bool) -> str:
    """Write which slots are draft slots and, of `several` adapters, whose. Returns the token ids [b, s]."""
    size, column = nodes.constant("vocab_size", vocab_size), nodes.constant("axis_2", [2])
    owner = nodes.add("Div", "input_ids", size, name="owner")  # 0 for the stock model
    drafts = nodes.add("Greater", owner, ("zero", 0), name="draft_flags")
    nodes.add("Unsqueeze", drafts, column, name=IS_DRAFT)  # [b, s, 1]
    indices = nodes.add("NonZero", drafts, name="draft_indices")
    nodes.add("Transpose", indices, name=SLOTS, perm=[1, 0])  # [n, 2]
    if several:
        owners = nodes.add("Unsqueeze", owner, column, name="slot_owner")
        nodes.add("GatherND", owners, SLOTS, name="draft_owner")  # [n, 1]
    return nodes.add("Sub", "input_ids", nodes.add("Mul", owner, size, name="owned"), name="slot_tokens")


def add(
    nodes: Nodes, x: str, product: str, weight: str, owners: Sequence[int], kind: Any, several: bool
) -> str:
    """`product` [b, s, out] of x [b, s, in], plus what the adapters with `owners` add to their slots. The
    bundle has `several` adapters.

    The draft slots alone are computed. Without any, these nodes have empty tensors and take no time.
    """
    name = weight.rpartition(".")[2]
    rows = nodes.add("GatherND", x, SLOTS, name=f"{name}_drafts")  # [n, in]
    low = nodes.add("MatMul", rows, f"{weight}.draft_a", name=f"{name}_low")  # [n, r]
    if several:
        own = nodes.add("Equal", "draft_owner", (f"{weight}.owners", owners), name=f"{name}_own")
        low = nodes.add("Where", own, low, ("no_draft", 0, kind), name=f"{name}_kept")
    added = nodes.add("MatMul", low, f"{weight}.draft_b", name=f"{name}_added")  # [n, out]
    return nodes.add("ScatterND", product, SLOTS, added, name=f"{name}_drafted", reduction="add")


def without_overflow(nodes: Nodes, x: str, kind: Any) -> str:
    """Keys and values x [b, s, out], with 0 for NaN, Inf and huge numbers of draft slots.

    Other slots attend to them with weight 0, but 0 * Inf would make these NaN, too.
    """
    size = nodes.add("Abs", x, name="draft_size")
    is_small = nodes.add("LessOrEqual", size, ("largest", LARGEST, kind), name="draft_is_small")
    kept = nodes.add("Where", is_small, x, ("no_draft", 0, kind), name="draft_finite")
    return nodes.add("Where", IS_DRAFT, kept, x, name="finite")


def computed_everywhere(model: Any) -> None:
    """Compute adapters at all slots, and use the results at draft slots: for TensorRT and CUDA graphs, where
    no shape may depend on data. Changes `model`.

    The choice is Where and not a product with 0, so that x A may overflow at slots of other owners.
    """
    renamed: dict[str, str] = {}
    nodes = []
    for node in model.graph.node:
        if node.op_type == "NonZero" or SLOTS in node.output:
            continue
        if node.op_type == "GatherND" and node.input[1] == SLOTS:
            renamed[node.output[0]] = node.input[0]
            continue
        node.input[:] = [renamed.get(name, name) for name in node.input]
        if node.op_type == "ScatterND":
            (product, _, added), [output] = node.input, node.output
            everywhere = f"{output}_everywhere"
            nodes.append(helper.make_node("Add", [product, added], [everywhere], name=everywhere))
            node = helper.make_node("Where", [IS_DRAFT, everywhere, product], [output], name=node.name)
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
