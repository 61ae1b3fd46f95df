"""Writes what draft adapters add to the products of a step: x A, 0 for other owners than the slot's, B.

Shapes in comments: b rows, s slots, r ranks of all adapters of a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx import helper

from .nodes import Nodes


def write_owners(nodes: Nodes, vocab_size: int) -> str:
    """Write `slot_owner` [b, s, 1], 0 for the stock model, and `has_drafts`. Returns the token ids [b, s]."""
    size = nodes.constant("vocab_size", vocab_size)
    owner = nodes.add("Div", "input_ids", size, name="owner")
    nodes.add("Unsqueeze", owner, nodes.constant("axis_2", [2]), name="slot_owner")
    largest = nodes.add("ReduceMax", owner, name="largest_owner", keepdims=0)
    nodes.add("Greater", largest, nodes.constant("zero", 0), name="has_drafts")
    return nodes.add("Sub", "input_ids", nodes.add("Mul", owner, size, name="owned"), name="slot_tokens")


def add(
    nodes: Nodes, x: str, product: str, weight: str, owners: Sequence[int], kind: Any, *, lazy: bool
) -> str:
    """`product` [b, s, out] of x [b, s, in], plus what the adapters with `owners` add for their slots.

    The choice is Where and not a product with 0, so that x A may overflow at slots of other owners. `lazy`:
    steps without draft slots skip it (`If`).
    """
    name = weight.rpartition(".")[2]
    columns = nodes.constant(f"{weight}.owners", owners)
    inner = Nodes() if lazy else nodes
    scope = nodes.local("")
    inner.scope(scope.rstrip("."))
    low = inner.add("MatMul", x, f"{weight}.draft_a", name=f"{name}_low")  # [b, s, r]
    own = inner.add("Equal", "slot_owner", columns, name=f"{name}_own")
    zero = nodes.constant("no_draft", 0, kind)
    kept = inner.add("Where", own, low, zero, name=f"{name}_kept")
    added = inner.add("MatMul", kept, f"{weight}.draft_b", name=f"{name}_added")
    if not lazy:
        return nodes.add("Add", product, added, name=f"{name}_drafted")
    made = inner.add("Add", product, added, name=f"{name}_sum")
    same = helper.make_node("Identity", [product], [f"{scope}{name}_same"], name=f"{scope}{name}_same")
    branches = {
        "then_branch": _branch(inner.nodes, made),
        "else_branch": _branch([same], same.output[0]),
    }
    return nodes.add("If", "has_drafts", name=f"{name}_drafted", **branches)


def _branch(branch: Sequence[Any], output: str) -> Any:
    info = helper.make_empty_tensor_value_info(output)
    return helper.make_graph(list(branch), output, [], [info])


def always(model: Any) -> None:
    """Replace each `If` by its then-branch: a CUDA graph cannot capture it. Changes `model`."""
    nodes = []
    for node in model.graph.node:
        if node.op_type != "If":
            nodes.append(node)
            continue
        branch = next(a.g for a in node.attribute if a.name == "then_branch")
        for inner in branch.node:
            inner.output[:] = [node.output[0] if o == branch.output[0].name else o for o in inner.output]
            nodes.append(inner)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def captured(node: Any) -> set[str]:
    """The values of the outer graph that a node reads, also in its branches."""
    inner = [n for a in node.attribute for n in a.g.node]
    made = {name for n in inner for name in n.output}
    return set(node.input) | ({name for n in inner for name in n.input} - made)
