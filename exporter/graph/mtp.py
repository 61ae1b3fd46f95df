"""Writes the MTP layer of a step: the draft tokens after the tokens that the step accepts (docs/decoding.md).

Shapes in comments: b rows, s slots, o outputs, c capacity, k draft tokens, d head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from onnx import TensorProto

from ..checkpoint.dims import Dims
from ..codes import Quantization, rotation
from .nodes import Nodes
from .operators import PRODUCT
from .weights import ONNX_DTYPES, Placed

FIRST, LAST, END = ("axis_start", [0]), ("last_row", [-1]), ("far", [2**30])


class Writer(Protocol):
    """The writer of a step (step.py): its nodes so far, and what the MTP layer has in common with others."""

    nodes: Nodes
    dims: Dims
    dtype: str
    quantization: Quantization | None

    def empty(self) -> Writer:
        """A writer of the same step without nodes."""

    def write_positions(self) -> None: ...
    def write_layer(self, i: int, hidden: str) -> str: ...
    def embedding(self, ids: str) -> str: ...
    def norm(self, x: str, module: str, name: str) -> str: ...
    def linear(self, x: str, weight: str, name: str, bias: bool) -> str: ...
    def head(self, normed: str, table: str) -> str: ...


def write(writer: Writer, hidden: str, count: int, outputs: Sequence[str]) -> None:
    """Write the `outputs` of the step, [b, o + k]: those in the scope `known`, and those of `count`, k, draft
    tokens, of `hidden` [b, s, hidden] of the last layer. Outputs but ids and confidences are 0 for these.
    """
    nodes, layer, form = writer.nodes, writer.dims.num_layers, writer.dims.mtp
    assert form is not None
    prefix = f"layers.{layer}.mtp"
    nodes.scope("mtp")
    following, slot = _following(nodes, "known.token_ids")
    if form.reads_normed:
        hidden = writer.norm(hidden, "norm", "read_normed")
        hidden = _scaled(writer, hidden, "scale")
    made = writer.write_layer(layer, _input(writer, hidden, following, "positions"))  # [b, s, hidden]
    index = nodes.add("Unsqueeze", slot, ("axis_2", [2]), name="slot_index")
    made = nodes.add("GatherND", made, index, name="chosen", batch_dims=1)  # [b, 1, hidden]
    column = nodes.add("Add", "kv_length_column", slot, name="chosen_position")  # [b, 1]
    past = {kind: f"present.{layer}.{kind}" for kind in ("key", "value")}
    if count > 1:  # room for the draft tokens' entries, which the step does not return
        room = nodes.constant("mtp_room", [0, 0, 0, 0, 0, 0, count - 1, 0])
        past = {kind: nodes.add("Pad", name, room, name=f"{kind}_room") for kind, name in past.items()}
    drafted: dict[str, list[str]] = {"token_ids": [], "confidence": []}  # [b, 1] each
    for number in range(count):
        if number:
            nodes.scope(f"mtp{number}")
            column = nodes.add("Add", column, ("one_column", [[1]]), name="position")
            made = _unrolled(writer, made, drafted["token_ids"][-1], column, past)
        made = writer.norm(made, f"{prefix}_final_norm", "final_normed")
        for name, value in zip(drafted, _best(writer, made), strict=True):
            drafted[name].append(value)
        if number + 1 < count:
            made = _scaled(writer, made, "own_scale")
    nodes.scope("")
    for name in outputs:
        if name in drafted:
            nodes.add("Concat", f"known.{name}", *drafted[name], name=f"all_{name}", output=name, axis=1)
        else:
            after = [0, 0, 0, count] if name in ("margin", "entropy") else [0, 0, 0, 0, count, 0]
            rows = nodes.constant(f"more_rows_{len(after)}", after)
            nodes.add("Pad", f"known.{name}", rows, name=f"all_{name}", output=name)


def _best(writer: Writer, normed: str) -> tuple[str, str]:
    """The most likely token of the shortlist after normed hidden states [b, 1, hidden], and its share among
    the shortlist's tokens; both [b, 1].
    """
    nodes, ids = writer.nodes, writer.dims.shortlist
    logits = writer.head(normed, "mtp_head.weight" if ids else "lm_head.weight")  # [b, tokens]
    both = [nodes.local("top_logit"), nodes.local("best_place")]
    top, token = nodes.add_many("TopK", logits, ("one_best", [1]), name="best", outputs=both, axis=-1)
    shares = nodes.add("Exp", nodes.add("Sub", logits, top, name="shifted"), name="shares")
    total = nodes.add("ReduceSum", shares, ("last_axis", [-1]), name="partition", keepdims=1)
    if ids:
        token = nodes.add("Gather", ("mtp_shortlist", ids), token, name="token")
    return token, nodes.add("Reciprocal", total, name="confidence")


def _scaled(writer: Writer, normed: str, name: str) -> str:
    """Normed hidden states [b, n, hidden] with the norm's scale `name`.

    Where hidden states are rotated, norms have no scale: it is part of the maps after them. The layer's input
    is normalized once more before its map, so here the scale itself counts. The rotation is that of
    `codes.rotation` after random signs, which change nothing here, and it is its own inverse.
    """
    nodes, size = writer.nodes, writer.dims.hidden_size
    if writer.quantization is None or not writer.quantization.is_integer:
        return normed
    outer, inner = (
        (f"rotation_{name}", matrix, np.float32)
        for name, matrix in zip(("outer", "inner"), rotation(size), strict=True)
    )

    def turned(x: str, when: str) -> str:
        x = nodes.add("MatMul", x, inner, name=f"{name}_{when}_inner")
        return nodes.add("MatMul", outer, x, name=f"{name}_{when}_outer")

    shape, stored = (len(outer[1]), len(inner[1])), f"layers.{writer.dims.num_layers}.mtp_{name}.weight"
    x = nodes.add("Reshape", normed, ("rotation_sizes", [0, 0, *shape]), name=f"{name}_parts")
    factors = nodes.add("Reshape", stored, ("rotation_shape", shape), name=f"{name}_factors")
    x = turned(nodes.add("Mul", turned(x, "before"), factors, name=f"{name}_on"), "after")
    return nodes.add("Reshape", x, ("flat_states", [0, 0, size]), name=f"{name}d")


def _input(writer: Writer, hidden: str, tokens: str, positions: str) -> str:
    """The layer's input [b, n, hidden] for hidden states [b, n, hidden] at `positions` [b, n], and the tokens
    [b, n] after them.
    """
    nodes, prefix, form = writer.nodes, f"layers.{writer.dims.num_layers}", writer.dims.mtp
    assert form is not None
    token = writer.embedding(tokens)
    if not form.sees_first:  # as in its training
        later = nodes.add("Greater", positions, ("zero", 0), name="is_later")
        later = nodes.add("Unsqueeze", later, ("axis_2", [2]), name="is_later_column")
        kept = nodes.add("Cast", later, name="kept", to=ONNX_DTYPES[writer.dtype])
        token = nodes.add("Mul", token, kept, name="token_embedding")
    parts = (
        writer.norm(hidden, f"{prefix}.mtp_hidden_norm", "hidden_normed"),
        writer.norm(token, f"{prefix}.mtp_token_norm", "token_normed"),
    )
    pair = nodes.add("Concat", *(parts[::-1] if form.token_first else parts), name="pair", axis=-1)
    return writer.linear(pair, f"{prefix}.mtp_input", "input", bias=False)


def _following(nodes: Nodes, ids: str) -> tuple[str, str]:
    """The token after each slot [b, s], and the slot of the last accepted token [b, 1], by the model's own
    tokens `ids` [b, o].

    Before the last pending token, that is the token fed next; from there on, the model's own.
    """
    axis, one = nodes.constant("axis_1", [1]), nodes.constant("first_end", [1])
    first = nodes.add("Slice", "output_index", FIRST, one, axis, name="first_output")  # [b, 1]
    sizes = {}
    for name, source in (("outputs", "output_index"), ("slots", "input_ids")):
        size = nodes.add("Shape", source, name=f"num_{name}", start=1, end=2)
        sizes[name] = nodes.add("Sub", size, one, name=f"last_of_{name}")
    place = nodes.add("Sub", "slots_indices", first, name="place")  # [b, s], of each slot among the outputs
    place = nodes.add("Max", place, ("zero", 0), name="place_or_first")
    place = nodes.add("Min", place, sizes["outputs"], name="place_inside")
    own = nodes.add("GatherElements", ids, place, name="own", axis=1)
    ends = (
        nodes.add("Slice", "input_ids", one, END, axis, name="ids_after_first"),
        nodes.add("Slice", "input_ids", LAST, END, axis, name="last_ids"),
    )
    fed = nodes.add("Concat", *ends, name="fed_next", axis=1)  # [b, s]
    is_known = nodes.add("Less", "slots_indices", first, name="is_known")
    following = nodes.add("Where", is_known, fed, own, name="following")
    # Output j + 1 is that of a draft token if it belongs to the slot after that of output j.
    at = nodes.add("Add", "slots_indices", first, name="slot_of_output")  # [b, s]
    at = nodes.add(
        "Slice", at, FIRST, nodes.add("Add", sizes["outputs"], one, name="num"), axis, name="slots_of"
    )
    after = nodes.add("Add", at, one, name="slot_after")  # [b, o]
    padded = nodes.add(
        "Pad", "output_index", ("one_column_more", [0, 0, 0, 1]), ("nothing", -1), name="padded"
    )
    is_draft = nodes.add(
        "Equal", nodes.add("Slice", padded, one, END, axis, name="next_output"), after, name="is_draft"
    )
    drafted = nodes.add(
        "GatherElements",
        "input_ids",
        nodes.add("Min", after, sizes["slots"], name="inside"),
        name="drafted",
        axis=1,
    )
    is_right = nodes.add("And", is_draft, nodes.add("Equal", drafted, ids, name="is_same"), name="is_right")
    wrong = nodes.add("Cast", nodes.add("Not", is_right, name="is_wrong"), name="wrong", to=TensorProto.INT64)
    before = nodes.add("CumSum", wrong, ("scalar_axis_1", 1), name="wrong_so_far")
    good = nodes.add(
        "Cast", nodes.add("Equal", before, ("zero", 0), name="is_good"), name="good", to=TensorProto.INT64
    )
    accepted = nodes.add("ReduceSum", good, axis, name="num_accepted", keepdims=1)  # [b, 1], of draft tokens
    return following, nodes.add("Add", first, accepted, name="chosen_slot")


def _unrolled(writer: Writer, hidden: str, token: str, position: str, past: dict[str, str]) -> str:
    """The layer once more for one slot at `position` [b, 1], from its own last output and `token` [b, 1].

    Its entries go to a copy of the layer's keys and values, `past`, which becomes the new one.
    """
    nodes, layer = writer.nodes, writer.dims.num_layers
    x = _input(writer, hidden, token, position)
    length = nodes.add("Squeeze", position, ("axis_1", [1]), name="length")  # [b]
    inner = writer.empty()
    inner.write_positions()
    made = inner.write_layer(layer, x)
    some = f"past_key_values.{writer.dims.kv_layers[0]}.key"  # which the masks' sizes are read from
    outer = {"input_ids": token, "kv_length": length, some: past["key"]}
    outer |= {f"past_key_values.{layer}.{kind}": name for kind, name in past.items()}
    nodes.embed(inner.nodes, outer)
    past |= {kind: nodes.local(f"present.{layer}.{kind}") for kind in past}
    return nodes.local(made)


def own_weights(nodes: Nodes, weights: Mapping[str, Placed]) -> dict[str, Placed]:
    """Give each DequantizeLinear, also those in products of integers, weights of its own name, because ONNX
    Runtime fuses it only if no other node reads them. Returns the weights to add, which are the same bytes.
    """
    seen: set[str] = set()
    added: dict[str, Placed] = {}
    for node in nodes.nodes:
        read = [i for i, name in enumerate(node.input) if name in weights]
        if node.op_type not in ("DequantizeLinear", PRODUCT) or not read:
            continue
        if node.input[read[0]] in seen:
            for i in read:
                name = node.input[i]
                node.input[i] = f"{node.name}.{name}"
                added[node.input[i]] = replace(weights[name], name=node.input[i])
        else:
            seen.add(node.input[read[0]])
    return added
