"""Attention over KV entries in 8 bits, as a function of standard operators with the bits of an operator.

All sums are of integers, and other operations are rounded one by one, so results depend neither on the number
of slots nor on the processor. docs/format.md specifies the numbers.

An entry of a head is `head_dim` codes and two bytes for their scale. Keys and queries are rotated by a
Hadamard matrix, which leaves their products as they are and spreads a few large numbers over all codes.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import TensorProto, helper

from ...runtime.bundle.manifest import SCALE_BYTES
from ..checkpoint.dims import Dims
from .nodes import Body, Nodes, Value
from .operators import DOMAIN

ATTENTION = "Attention"
INPUTS = ("q", "k", "v", "past_key", "past_value", "kv_length", "scale", "window")
OUTPUTS = ("attended", "key", "value")
CODE = 127  # the largest of a key or value
WEIGHT = 32767  # the largest of a value's weight
OCTAVE, OCTAVES = 512, 24  # steps between a weight and its half; the weights that are not zero
HEAVIEST = 2.0**22  # the weight of the entry with the highest score
LOWEST_POWER, POWERS = -32, 64  # of a scale, and how many there are
UNSEEN = -1e38  # a score below all others
TINY = 2.0**-40  # in place of the largest number of a row of zeros
ANY = 2**31 - 1  # the window of a layer that has none


def max_query(head_dim: int) -> int:
    """The largest code of a query: sums of its products with codes of a key are exact in fp32."""
    return int(2 ** math.floor(math.log2((2**24 / CODE) / head_dim))) - 1


def rotated_block(head_dim: int) -> int:
    """The size of the Hadamard matrices: the largest power of two that divides a head."""
    return head_dim & -head_dim


def rotation(head_dim: int) -> np.ndarray:
    """[head_dim, head_dim] of 1, -1 and, between two blocks, 0. It is its own transpose."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < rotated_block(head_dim):
        matrix = np.kron(np.array([[1, 1], [1, -1]], np.float32), matrix)
    return np.kron(np.eye(head_dim // len(matrix), dtype=np.float32), matrix)


# 2^(-r / OCTAVE), r from 0 to 511, by x = r / OCTAVE: a + x (b + x (c + x (d + x e))). Relative error 3e-6.
POLYNOMIAL = (1.0, -0.69306418, 0.23946085, -0.05323139, 0.00683635)


def weights() -> np.ndarray:
    """The weight, an integer, of an entry whose score is 0, 1, ... steps below the highest one."""
    step = np.arange(OCTAVE * OCTAVES, dtype=np.int32)
    x = (step % OCTAVE).astype(np.float32) * np.float32(1 / OCTAVE)
    made = np.full_like(x, POLYNOMIAL[-1])
    for term in POLYNOMIAL[-2::-1]:
        made = made * x + np.float32(term)  # numpy rounds the product, too
    made = np.rint(made * np.exp2(np.float32(22) - (step // OCTAVE).astype(np.float32)))
    return np.append(made, np.float32(0))


def attention(nodes: Nodes, dims: Dims, i: int, q: str, k: str, v: str, opset: int) -> str:
    """Write layer i's new k and v [b, kv_heads, s, d] into its entries, and attend with q [b, heads, s, d]:
    [b, s, heads d].

    One node calls a function of the model, which ONNX Runtime replaces by the function's nodes, unless the
    session has the operator of mars-export-kernels.
    """
    nodes.functions.setdefault(ATTENTION, _function(dims, opset))
    window = dims.windows[i]
    entries = [f"past_key_values.{i}.{kind}" for kind in ("key", "value")]
    factors = (("attention_scale", dims.attention_scale, np.float32), (f"window_of_{window}", window or ANY))
    outputs = [nodes.local("attended"), f"present.{i}.key", f"present.{i}.value"]
    inputs: tuple[Value, ...] = (q, k, v, *entries, "kv_length", *factors)
    return nodes.add_many(ATTENTION, *inputs, name="attention", outputs=outputs, domain=DOMAIN)[0]


def _number(name: str, value: float) -> tuple[str, float, type]:
    return name, value, np.float32


def _function(dims: Dims, opset: int) -> onnx.FunctionProto:
    body = Body()
    k = _rotated(body, "k", dims.head_dim)
    for name, x in (("key", k), ("value", "v")):
        entries = _entries(body, x, f"new_{name}")
        body.add(
            "TensorScatter",
            f"past_{name}",
            entries,
            "kv_length",
            name=f"{name}_write",
            output=name,
            axis=2,
            mode="linear",
        )
    keys, key_scale = _decoded(body, "key", dims.head_dim)
    values, value_scale = _decoded(body, "value", dims.head_dim)
    codes, factor = _queries(body, dims)  # [b, kv_heads, group s, d], [b, heads, s, 1]
    turned = body.add(
        "Transpose",
        body.add("Cast", keys, name="keys_f32", to=TensorProto.FLOAT),
        name="keys_turned",
        perm=[0, 1, 3, 2],
    )
    sums = body.add("MatMul", codes, turned, name="scores_sums")
    raw = body.add("Mul", sums, key_scale, name="scores_grouped")  # [b, kv_heads, group s, c]
    by_head = ("scores_by_head", [0, dims.num_heads, -1, 0])
    raw = body.add("Reshape", raw, by_head, name="scores_raw")  # [b, heads, s, c]
    mask = _mask(body)
    scores = body.add("Where", mask, raw, _number("unseen", UNSEEN), name="scores")
    highest = body.add("ReduceMax", scores, ("last_axis", [-1]), name="highest", keepdims=1)
    below = body.add("Mul", body.add("Sub", highest, scores, name="below"), factor, name="steps_below")
    steps = body.add("Min", below, _number("last_step", OCTAVE * OCTAVES), name="steps_in_table")
    steps = body.add("Cast", body.add("Round", steps, name="steps_whole"), name="steps", to=TensorProto.INT32)
    table = ("weight_table", weights(), np.float32)
    softmax = body.add("Gather", table, steps, name="weights")  # [b, heads, s, c]
    total = body.add("Cast", softmax, name="weights_f64", to=TensorProto.DOUBLE)
    total = body.add("ReduceSum", total, "last_axis", name="total_f64", keepdims=1)
    total = body.add("Cast", total, name="total", to=TensorProto.FLOAT)
    by_kv_head = body.constant("by_kv_head", [0, dims.num_kv_heads, -1, 0])
    scaled = body.add("Reshape", softmax, by_kv_head, name="weights_grouped")
    scaled = body.add("Mul", scaled, value_scale, name="weights_scaled")
    largest = body.add("ReduceMax", scaled, "last_axis", name="largest_weight", keepdims=1)
    unit = body.add("Div", _number("weight_most", WEIGHT), largest, name="weight_unit")
    whole = body.add("Round", body.add("Mul", scaled, unit, name="weights_units"), name="weights_whole")
    mixed = body.add(
        "MatMul",
        body.add("Cast", whole, name="weights_whole_f64", to=TensorProto.DOUBLE),
        body.add("Cast", values, name="values_f64", to=TensorProto.DOUBLE),
        name="mixed_sums",
    )
    mixed = body.add("Cast", mixed, name="mixed_f32", to=TensorProto.FLOAT)  # [b, kv_heads, group s, d]
    step = body.add("Mul", largest, _number("weight_step", 1 / (CODE * WEIGHT)), name="mixed_step")
    step = body.add("Reshape", step, by_head, name="mixed_step_by_head")
    mixed = body.add("Reshape", mixed, by_head, name="mixed_by_head")
    mixed = body.add("Mul", mixed, body.add("Div", step, total, name="mixed_unit"), name="mixed")
    rows = body.add("Transpose", mixed, name="attended_rows", perm=[0, 2, 1, 3])
    flat = ("flat_heads", [0, 0, dims.num_heads * dims.head_dim])
    body.add("Reshape", rows, flat, name="attended_flat", output="attended")
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_function(DOMAIN, ATTENTION, [*INPUTS], [*OUTPUTS], body.nodes, opsets)


def _largest(body: Nodes, x: str, name: str) -> str:
    absolute = body.add("Abs", x, name=f"{name}_abs")
    return body.add("ReduceMax", absolute, ("last_axis", [-1]), name=f"{name}_largest", keepdims=1)


def _rotated(body: Nodes, x: str, head_dim: int) -> str:
    """x by the orthogonal matrix. It is rounded to integers first, so that sums are exact."""
    block = rotated_block(head_dim)
    most = 2**22 // block
    largest = body.add("Max", _largest(body, x, x), _number("tiny", TINY), name=f"{x}_span")
    unit = body.add("Div", _number("rotated_most", most), largest, name=f"{x}_unit")
    whole = body.add("Round", body.add("Mul", x, unit, name=f"{x}_units"), name=f"{x}_whole")
    matrix = ("rotation", rotation(head_dim), np.float32)
    sums = body.add("MatMul", whole, matrix, name=f"{x}_turned")
    step = body.add("Mul", largest, _number("rotated_step", 1 / (most * math.sqrt(block))), name=f"{x}_step")
    return body.add("Mul", sums, step, name=f"{x}_rotated")


def _queries(body: Nodes, dims: Dims) -> tuple[str, str]:
    """Codes of q [b, kv_heads, group s, d], whole fp32 numbers, and the steps of weights that a unit of their
    products makes [b, heads, s, 1].
    """
    most = max_query(dims.head_dim)
    rotated = _rotated(body, "q", dims.head_dim)
    largest = body.add("Max", _largest(body, rotated, rotated), _number("tiny", TINY), name="q_most")
    unit = body.add("Div", _number("query_most", most), largest, name="q_code_unit")
    units = body.add("Mul", rotated, unit, name="q_code_units")
    codes = body.add("Round", units, name="q_codes")
    steps = _number("steps_of_unit", math.log2(math.e) * OCTAVE / (CODE * most))
    factor = body.add("Mul", largest, body.add("Mul", "scale", steps, name="q_factor"), name="q_steps")
    by_kv_head = ("queries_by_kv_head", [0, dims.num_kv_heads, -1, dims.head_dim])
    return body.add("Reshape", codes, by_kv_head, name="q_grouped"), factor


def _entries(body: Nodes, x: str, name: str) -> str:
    """x [b, kv_heads, s, d] as entries [b, kv_heads, s, d + 2] int8: codes, the scale's power of two, and its
    128ths.
    """
    largest = _largest(body, x, name)
    powers = ("powers", np.exp2(np.arange(LOWEST_POWER, LOWEST_POWER + POWERS)), np.float32)
    reached = body.add("GreaterOrEqual", largest, powers, name=f"{name}_reached")
    reached = body.add("Cast", reached, name=f"{name}_ones", to=TensorProto.FLOAT)
    power = body.add("ReduceSum", reached, "last_axis", name=f"{name}_power", keepdims=1)  # 0 to POWERS
    unit = _unit(body, power, name)
    share = body.add("Div", largest, unit, name=f"{name}_share")
    least, most = _number("least_share", 128), _number("most_share", 256)
    share = body.add("Ceil", share, name=f"{name}_share_up")
    share = body.add("Clip", share, least, most, name=f"{name}_share_inside")
    scale = body.add("Mul", unit, share, name=f"{name}_scale")
    step = body.add("Mul", scale, _number("code_step", 1 / CODE), name=f"{name}_step")
    codes = body.add("Round", body.add("Div", x, step, name=f"{name}_units"), name=f"{name}_whole")
    codes = body.add("Clip", codes, _number("low", -CODE), _number("high", CODE), name=f"{name}_codes")
    power = body.add("Sub", power, _number("middle_power", POWERS // 2), name=f"{name}_power_byte")
    share = body.add("Sub", share, _number("middle_share", 192), name=f"{name}_share_byte")
    whole = body.add("Concat", codes, power, share, name=f"{name}_f32", axis=-1)
    return body.add("Cast", whole, name=f"{name}_entries", to=TensorProto.INT8)


def _unit(body: Nodes, power: str, name: str) -> str:
    """A 128th of the power of two that a scale has, by its number from 0 on."""
    units = ("units", np.exp2(np.arange(LOWEST_POWER - 1, LOWEST_POWER + POWERS) - 7), np.float32)
    index = body.add("Cast", power, name=f"{name}_power_index", to=TensorProto.INT64)
    return body.add("Gather", units, index, name=f"{name}_unit")


def _decoded(body: Nodes, entries: str, head_dim: int) -> tuple[str, str]:
    """The codes [b, kv_heads, c, d] int8 and the scales [b, kv_heads, 1, c] of entries."""
    sizes = ("entry_sizes", [head_dim, 1, SCALE_BYTES - 1])
    parts = [f"{entries}_{part}" for part in ("code", "power", "share")]
    codes, power, share = body.split(entries, sizes, parts, f"{entries}_parts")
    power = body.add("Cast", power, name=f"{entries}_power_f32", to=TensorProto.FLOAT)
    power = body.add("Add", power, _number("middle_power", POWERS // 2), name=f"{entries}_power_number")
    share = body.add("Cast", share, name=f"{entries}_share_f32", to=TensorProto.FLOAT)
    share = body.add("Add", share, _number("middle_share", 192), name=f"{entries}_share_number")
    scale = body.add("Mul", _unit(body, power, entries), share, name=f"{entries}_scale_column")
    return codes, body.add("Transpose", scale, name=f"{entries}_scale", perm=[0, 1, 3, 2])


def _mask(body: Nodes) -> str:
    """[b, 1, s, c]: the entries up to a slot's own, and in its window. The nodes are the same for all
    layers.
    """
    indices = []
    for name, of in (("slots", "q"), ("capacity", "past_key")):
        length = body.add("Shape", of, name=f"num_{name}_1d", start=2, end=3)
        scalar = body.add("Squeeze", length, name=f"num_{name}")
        indices.append(body.add("Range", ("zero", 0), scalar, ("one", 1), name=f"{name}_indices"))
    slots, keys = indices
    start = body.add("Unsqueeze", "kv_length", ("axis_1", [1]), name="start")
    positions = body.add("Add", start, slots, name="positions")
    column = body.add("Unsqueeze", positions, ("axes_1_3", [1, 3]), name="positions_column")
    causal = body.add("LessOrEqual", keys, column, name="causal")
    first = body.add("Sub", column, "window", name="window_start")
    return body.add("And", causal, body.add("Greater", keys, first, name="inside"), name="mask")
