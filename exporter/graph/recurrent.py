"""Writes the recurrent layers of a hybrid: gated delta nets with states saved a step late.

A state cannot forget a token, so a step never saves one that has a token which may still be rejected. Between
two steps a row has the state before the last step's first output, and `inputs`: what the layer computed of
the tokens just before that state, which the convolution reads, and of those from there on. A step

1. brings the state to its own first output, over the tokens that were accepted since (from `inputs`) and
   those that are known now, and saves it;
2. runs the other slots from there. It saves their `inputs`, and drops the state that they give.

If a row has fewer tokens in a part than another row, its rates and log-decays are 0, which leaves its state
unchanged, bit for bit.

Shapes in comments: b rows, s slots, o outputs, e numbers of an entry, w tokens that the convolution reads
before its own. A place is a slot relative to the row's `kv_length`; those below 0 are in `inputs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..checkpoint.dims import Recurrent
from .nodes import Nodes, Value
from .operators import MICROSOFT

# ONNX Runtime has a kernel for its own form of this: ai.onnx's becomes a Scan, 3 to 5 times as slow.
LINEAR = "LinearAttention"
ZERO, ONE, AXIS_1, FAR = ("zero", 0), ("one", 1), ("axis_1", [1]), ("far", [2**30])

Norm = Callable[[str, str, str], str]
"""Called with a value, the name of its scale and a name: the RMS norm over the last axis."""


def write_places(nodes: Nodes, net: Recurrent) -> None:
    """The inputs of `attend`, once for all layers. `lag` [b] are the tokens to catch up with, `known` [b] the
    slots before the first output.
    """
    nodes.scope("recurrent")
    width = ("width", net.kernel - 1)

    def add(op: str, *inputs: Value, name: str, **attributes: Any) -> str:
        return nodes.add(op, *inputs, name=name, **attributes)

    def places(name: str, first: Value, end: Value) -> str:
        return add("Range", first, end, ONE, name=name)

    def last_axis(name: str, x: str) -> str:
        return add("Unsqueeze", x, ("axis_2", [2]), name=name)

    def size(name: str, source: str) -> str:
        return add("Squeeze", add("Shape", source, name=f"{name}_1d", start=1, end=2), name=name)

    slots, outputs = size("slots", "input_ids"), size("outputs", "output_index")
    lag = add("Sub", "kv_length", "state_length", name="lag_of_rows")
    known = add("Gather", "output_index", ZERO, name="known_of_rows", axis=1)
    most = add("ReduceMax", lag, name="most", keepdims=0)
    first, last = (add(f"Reduce{end}", known, name=f"{end}_known", keepdims=0) for end in ("Min", "Max"))
    lag, known = add("Unsqueeze", lag, AXIS_1, name="lag"), add("Unsqueeze", known, AXIS_1, name="known")
    # Part 1 has the places from -most to last, part 2 those from first on: rows know more slots than others.
    begin = add("Neg", most, name="begin")
    old = add("Add", places("old_places", begin, width), lag, name="old_entries")
    last_axis("old", add("Max", old, ZERO, name="old_inside"))  # [b, w + most, 1], of `inputs`
    place = places("saved_places", begin, last)
    is_caught_up = add("GreaterOrEqual", place, add("Neg", lag, name="lag_begin"), name="is_since_state")
    is_known = add("Less", place, known, name="is_before_output")
    last_axis("is_saved", add("And", is_caught_up, is_known, name="saved"))
    is_ahead = add("GreaterOrEqual", places("ahead_places", first, slots), known, name="ahead")
    last_axis("is_ahead", is_ahead)
    end = add("Add", add("Add", most, last, name="num_saved"), width, name="saved_end_0d")
    add("Unsqueeze", end, ("axis_0", [0]), name="saved_end")
    add("Unsqueeze", add("Add", most, first, name="ahead_begin_0d"), ("axis_0", [0]), name="ahead_begin")
    # The results of known slots are in part 1, those of the others after all of them.
    slot = places("slot_places", ZERO, slots)
    both = add("Sub", last, first, name="in_both")
    skipped = add("Where", add("Less", slot, known, name="is_known"), ZERO, both, name="skipped")
    last_axis("result", add("Add", add("Add", slot, most, name="after_lag"), skipped, name="in_parts"))
    # The entries to keep: w before the first output, and those of the outputs.
    kept = places(
        "kept_places", most, add("Add", add("Add", most, outputs, name="to"), width, name="kept_end")
    )
    kept = add("Add", kept, known, name="kept_entries")
    end = add("Add", add("Add", most, slots, name="num_entries"), ("last_entry", net.kernel - 2), name="end")
    last_axis("kept", add("Min", kept, end, name="kept_inside"))
    nodes.scope("")


def attend(nodes: Nodes, net: Recurrent, i: int, packed: str, norm: Norm) -> str:
    """`packed` [b, s, e + values] of layer i's input -> [b, s, values], gated, for the output map."""
    values = net.value_heads * net.value_dim
    sizes = ("recurrent_sizes", [net.mixed, values, net.value_heads, net.value_heads])
    mixed, gate, a, b = nodes.split(packed, sizes, ("mixed", "output_gate", "a", "b"), "packed_split")
    entries = nodes.add("Concat", mixed, a, b, name="entries", axis=2)  # [b, s, e]
    past = f"past_key_values.{i}.inputs"
    old = nodes.add("GatherND", past, "recurrent.old", name="old", batch_dims=1)
    window = nodes.add("Concat", old, entries, name="window", axis=1)  # [b, w + most + s, e]
    kept = nodes.add("GatherND", window, "recurrent.kept", name="kept", batch_dims=1)
    nodes.add("TensorScatter", past, kept, name="inputs_write", output=f"present.{i}.inputs", axis=1)
    state = f"present.{i}.state"
    known = nodes.add("Slice", window, ("start", [0]), "recurrent.saved_end", AXIS_1, name="known")
    known = _part(nodes, net, i, "known", known, "recurrent.is_saved", f"past_key_values.{i}.state", state)
    ahead = nodes.add("Slice", window, "recurrent.ahead_begin", FAR, AXIS_1, name="ahead")
    ahead = _part(nodes, net, i, "ahead", ahead, "recurrent.is_ahead", state, nodes.local("ahead_state"))
    both = nodes.add("Concat", known, ahead, name="both", axis=1)
    made = nodes.add("GatherND", both, "recurrent.result", name="made", batch_dims=1)  # [b, s, values]
    by_head = ("value_heads", [0, 0, net.value_heads, net.value_dim])
    made = nodes.add("Reshape", made, by_head, name="made_heads")
    made = norm(made, f"layers.{i}.recurrent_norm.weight", "made_normed")
    made = nodes.add("Reshape", made, ("flat_values", [0, 0, values]), name="made_flat")
    active = nodes.add(
        "Mul", gate, nodes.add("Sigmoid", gate, name="output_gate_share"), name="output_gate_active"
    )
    return nodes.add("Mul", made, active, name="made_gated")


def _part(nodes: Nodes, net: Recurrent, i: int, part: str, x: str, mask: str, past: str, state: str) -> str:
    """The net over the entries x [b, w + n, e] where `mask` [b, n, 1], from the state `past` on; the state
    after them is called `state`. [b, n, values]
    """
    keys, values, heads = net.key_heads * net.key_dim, net.value_heads * net.value_dim, net.value_heads

    def add(op: str, *inputs: Value, name: str, **attributes: Any) -> str:
        return nodes.add(op, *inputs, name=f"{part}_{name}", **attributes)

    def split(x: str, sizes: Value, names: str, name: str) -> list[str]:
        return nodes.split(x, sizes, [f"{part}_{each}" for each in names], f"{part}_{name}")

    def later(x: str, name: str) -> str:
        return add("Slice", x, ("width_1d", [net.kernel - 1]), FAR, AXIS_1, name=name)

    def unit(x: str, name: str) -> str:
        # x / sqrt(sum(x * x) + 1e-6) is this norm with the scale 1 / sqrt(size) and the epsilon 1e-6 / size
        scale = ("unit_scale", np.full(net.key_dim, net.key_dim**-0.5), np.float32)
        by_head = add("Reshape", x, ("key_heads", [0, 0, net.key_heads, net.key_dim]), name=f"{name}_heads")
        normed = add("RMSNormalization", by_head, scale, name=f"{name}_unit", epsilon=1e-6 / net.key_dim)
        return add("Reshape", normed, ("flat_keys", [0, 0, keys]), name=f"{name}_flat")

    mixed, a, b = split(x, ("entry_sizes", [net.mixed, heads, heads]), "xab", "split")
    mixed = _convolved(nodes, net, i, part, mixed)
    q, k, v = split(mixed, ("net_sizes", [keys, keys, values]), "qkv", "qkv_split")
    rate = add("Neg", add("Exp", f"layers.{i}.decay", name="rate_size"), name="rate")
    step = add("Add", later(a, "step_later"), f"layers.{i}.decay_bias", name="step_sum")
    decay = add("Mul", add("Softplus", step, name="step"), rate, name="decay_raw")
    beta = add("Sigmoid", later(b, "beta_later"), name="beta_raw")
    nothing = ("nothing_f32", 0, np.float32)
    return nodes.add_many(
        LINEAR,
        *(unit(q, "q"), unit(k, "k"), v, past),
        add("Where", mask, decay, nothing, name="decay"),
        add("Where", mask, beta, nothing, name="beta"),
        name=f"{part}_net",
        outputs=[nodes.local(f"{part}_made"), state],
        domain=MICROSOFT,
        q_num_heads=net.key_heads,
        kv_num_heads=net.value_heads,
    )[0]


def _convolved(nodes: Nodes, net: Recurrent, i: int, part: str, x: str) -> str:
    """The causal convolution of each channel of x [b, w + n, mixed], and SiLU: [b, n, mixed].

    ONNX Runtime's operator CausalConvWithState takes 2 to 10 times as long.
    """
    weight = nodes.add("Transpose", f"layers.{i}.convolution.weight", name=f"{part}_taps", perm=[2, 1, 0])
    names = [nodes.local(f"{part}_tap_{tap}") for tap in range(net.kernel)]
    taps = nodes.add_many(
        "Split", weight, name=f"{part}_taps_split", outputs=names, axis=0, num_outputs=net.kernel
    )
    total = ""
    for tap, factor in enumerate(taps):
        last = tap == net.kernel - 1
        end = FAR if last else (f"tap_{tap}_end", [tap + 1 - net.kernel])
        seen = nodes.add("Slice", x, (f"tap_{tap}", [tap]), end, AXIS_1, name=f"{part}_seen_{tap}")
        seen = nodes.add("Mul", seen, factor, name=f"{part}_weighted_{tap}")
        total = nodes.add("Add", total, seen, name=f"{part}_sum_{tap}") if total else seen
    share = nodes.add("Sigmoid", total, name=f"{part}_share")
    return nodes.add("Mul", total, share, name=f"{part}_convolved")
