"""Nodes of factors, caps, activations and growing queries, each of which adds none if its quirk is off; of
quantized Linear maps and embeddings, in standard operators; and of a step's outputs, in fp32.

Shapes in comments: b rows, s slots, o outputs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from ..checkpoint.families import Quirks
from ..codes import BLOCK, Codec
from .nodes import Body, Nodes

LAST = "last_axis"
LAST_AXIS = (LAST, [-1])
CODE_STEP, MIDDLE = ("code_step", 1 / 127, np.float32), ("middle", 128, np.uint8)  # of activations
BEND = 0.044715  # of Gelu's approximation by tanh


def scaled(nodes: Nodes, x: str, factor: float, name: str, kind: np.dtype) -> str:
    """x times a scalar; `kind` is the type of both."""
    if factor == 1.0:
        return x
    return nodes.add("Mul", x, (f"{name}_factor", factor, kind), name=name)


def capped(nodes: Nodes, x: str, cap: float, name: str) -> str:
    """cap * tanh(x / cap), x in fp32."""
    if not cap:
        return x
    size = nodes.constant(f"{name}_size", cap, np.float32)
    inside = nodes.add("Tanh", nodes.add("Div", x, size, name=f"{name}_inside"), name=f"{name}_tanh")
    return nodes.add("Mul", inside, size, name=name)


def activated(
    nodes: Nodes, quirks: Quirks, gate: str, kind: np.dtype, is_plain: bool, is_cuda: bool = False
) -> str:
    """The activation of the MLP's gate. `is_plain`: without the operator Gelu, which opset 18 lacks."""
    if quirks.activation == "silu":
        if is_cuda:
            return nodes.add("QuickGelu", gate, name="gate_silu", domain=MICROSOFT, alpha=1.0)
        return nodes.add("Mul", gate, nodes.add("Sigmoid", gate, name="gate_sigmoid"), name="gate_silu")
    if not is_plain:
        return nodes.add("Gelu", gate, name="gate_gelu", approximate="tanh")
    # 0.5 x (1 + tanh(y)) = x sigmoid(2 y), y = sqrt(2 / pi) (x + BEND x^3)
    slope = 2 * math.sqrt(2 / math.pi)
    square = nodes.add("Mul", gate, gate, name="gate_square")
    bent = scaled(nodes, square, BEND * slope, "gelu_bend", kind)
    bent = nodes.add("Add", bent, ("gelu_slope", slope, kind), name="gelu_bent")
    share = nodes.add("Sigmoid", nodes.add("Mul", gate, bent, name="gelu_inside"), name="gelu_share")
    return nodes.add("Mul", gate, share, name="gate_gelu")


def attention_settings(quirks: Quirks) -> dict[str, Any]:
    """Attributes of the operator Attention.

    Its `softcap` is for the `cuda` layout only: ONNX Runtime 1.24 to 1.26 mask before they cap, so that
    nothing is masked (1.28 is right). Elsewhere capped scores are computed with plain operators.
    """
    return {} if quirks.attention_scale is None else {"scale": quirks.attention_scale}


def query_growth(nodes: Nodes, quirks: Quirks, column: str, dtype: int) -> None:
    """`query_growth` [b, 1, s, 1] for the positions `column` [b, 1, s, 1], once for all layers."""
    if quirks.query_growth is None:
        return
    beta, length = quirks.query_growth
    spans = nodes.add("Div", column, ("growth_length", length), name="growth_spans")
    spans = nodes.add("Cast", spans, name="growth_spans_f32", to=TensorProto.FLOAT)
    one = ("one_f32", 1.0, np.float32)
    log = nodes.add("Log", nodes.add("Add", spans, one, name="growth_base"), name="growth_log")
    log = nodes.add("Mul", log, ("growth_beta", beta, np.float32), name="growth_share")
    grown = nodes.add("Add", log, one, name="query_growth_f32")
    nodes.add("Cast", grown, name="query_growth", to=dtype)


DOMAIN = "mars_export"  # of the operators of mars-export-kernels
PRODUCT, GROUPED = "QuantizedMatMul", "GroupedMatMul"
MICROSOFT = "com.microsoft"  # operators of ONNX Runtime's own


def dequantized(nodes: Nodes, x: str, weight: str, codec: Codec, name: str) -> str:
    """x [..., in] times the decoded weight [in, out].

    ONNX Runtime and TensorRT fuse the pair into one kernel.
    """
    inputs = [weight, f"{weight}_scale"] + ([] if codec.symmetric else [f"{weight}_zero_point"])
    axis, block_size = (1, 0) if codec.group_size is None else (0, codec.group_size)
    decoded = nodes.add("DequantizeLinear", *inputs, name=f"{name}_weight", axis=axis, block_size=block_size)
    return nodes.add("MatMul", x, decoded, name=name)


def integer_product(nodes: Nodes, x: str, weight: str, name: str, opset: int) -> str:
    """x [..., in] fp32 times an int8 weight in panels. Each row of x has its own scale, so that rows do not
    affect each other.

    One node calls a function of the model (docs/format.md). ONNX Runtime replaces it by the function's nodes,
    unless the session has the operator of mars-export-kernels, which has the function's name.
    """
    nodes.functions.setdefault(PRODUCT, _product_of_rows(opset))
    return nodes.add(PRODUCT, x, weight, f"{weight}_scale", name=name, domain=DOMAIN)


def _product_of_rows(opset: int) -> onnx.FunctionProto:
    """A row is divided by its largest number, so that the scale of its codes is a constant: ONNX Runtime then
    fuses everything from DequantizeLinear to MatMul into one kernel. Codes are unsigned, around 128, because
    unsigned times signed bytes is the fast product. The codes of a row of zeros are arbitrary (0 / 0), but
    its largest number, zero, makes its products zero, which saves a node. ONNX Runtime computes the matrix's
    codes from the panels once, when it opens the graph; the sums after the last input go with the padding.
    """
    body = Body()
    matrix = _flattened(body, _by_input(body, "weight", 4), 2, _matrix_size(body), "matrix_codes")
    codes, largest = _codes_of_rows(body)
    decoded = body.add("DequantizeLinear", codes, CODE_STEP, MIDDLE, name="decoded")
    matrix = body.add("DequantizeLinear", matrix, "scale", name="matrix", axis=1)
    body.add("Mul", body.add("MatMul", decoded, matrix, name="units"), largest, name="y")
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_function(DOMAIN, PRODUCT, ["x", "weight", "scale"], ["y"], body.nodes, opsets)


def _matrix_size(body: Body) -> str:
    inputs, outputs = (
        body.add("Shape", "x", name="num_inputs", start=-1),
        body.add("Shape", "scale", name="num_outputs"),
    )
    return body.add("Concat", inputs, outputs, name="size", axis=0)


def _by_input(body: Body, panels: str, rank: int) -> str:
    """[panels, ..., columns, inputs] -> [..., inputs, panels, columns]. ONNX Runtime moves one axis at a time
    six times as fast as all in one Transpose.
    """
    axes = list(range(rank))
    rows = body.add("Transpose", panels, name="inputs_first", perm=[*axes[:-2], rank - 1, rank - 2])
    return body.add("Transpose", rows, name="by_input", perm=[*axes[1:-1], 0, rank - 1])


def _flattened(body: Body, x: str, axis: int, size: str, name: str) -> str:
    """The first `size` numbers of x as a matrix whose columns are the axes from `axis` on."""
    flat = body.add("Flatten", x, name=f"{name}_padded", axis=axis)
    return body.add("Slice", flat, ("origin", [0, 0]), size, name=name)


def _codes_of_rows(body: Body) -> tuple[str, str]:
    """The codes of x [..., in] uint8, around MIDDLE, and the largest number of each row, [..., 1]."""
    largest = body.add("ReduceMax", body.add("Abs", "x", name="abs"), LAST_AXIS, name="row", keepdims=1)
    unit = body.add("Div", "x", largest, name="unit")
    return body.add("QuantizeLinear", unit, CODE_STEP, MIDDLE, name="codes"), largest


def grouped_product(nodes: Nodes, x: str, weight: str, codec: Codec, name: str, opset: int) -> str:
    """x [..., in] fp32 times a weight of `multiplied` codes in panels, in the way of `integer_product`."""
    nodes.functions.setdefault(GROUPED, _grouped_product_of_rows(codec, opset))
    return nodes.add(GROUPED, x, weight, f"{weight}_scale", name=name, domain=DOMAIN)


def _grouped_product_of_rows(codec: Codec, opset: int) -> onnx.FunctionProto:
    """A weight's integers, multiplier (code - zero point), need 13 bits: they are 64 high + low, whose
    products with codes of x add up in pairs without saturation on processors that add in 16 bits. ONNX
    Runtime computes both from the constants when it opens the graph; it would not compute a DequantizeLinear.
    """
    body = Body()

    def number(name: str) -> str:
        return body.add("Cast", name, name=f"{name}_f32", to=TensorProto.FLOAT)

    size = _matrix_size(body)
    both, factors = body.split("weight", ("parts_sizes", [8, 1]), ("both", "factors"), "parts", axis=2)
    halves = [
        body.add("BitwiseAnd", both, ("low_bits", 15, np.uint8), name="lower"),
        body.add("BitShift", both, ("high_bits", 4, np.uint8), name="upper", direction="RIGHT"),
    ]
    halves = [body.add("Reshape", x, ("fours", [0, 0, 2, 1, 4, 16, 4]), name=f"{x}_fours") for x in halves]
    codes = body.add("Concat", *halves, name="panels", axis=3)
    codes = _flattened(body, _by_input(body, codes, 7), 5, size, "weight_codes")
    factors = body.add("Reshape", factors, ("pairs", [0, 0, 2, 16, 2]), name="factors_by_kind")
    factors = body.add("Transpose", factors, name="factors_by_group", perm=[2, 1, 4, 0, 3])
    num_factors = body.add("Div", size, ("inputs_of_factor", [codec.group_size, 1]), name="num_factors")

    def by_group(kind: str, name: str) -> str:
        numbers = number(_flattened(body, kind, 3, num_factors, f"{kind}_matrix"))
        return body.add("Unsqueeze", numbers, ("axis_1", [1]), name=name)  # [groups, 1, out]

    kinds = body.split(factors, ("ones", [1, 1]), ("multiplier", "zero_point"), "factors_split", axis=0)
    groups = body.add("Concat", ("group", [-1, codec.group_size]), "num_outputs", name="groups", axis=0)
    plain = body.add("Reshape", number(codes), groups, name="grouped")  # [groups, group, out]
    plain = body.add("Sub", plain, by_group(kinds[1], "zero_points"), name="centred")
    plain = body.add("Mul", plain, by_group(kinds[0], "multipliers"), name="multiplied")
    plain = body.add("Reshape", plain, size, name="integers")
    radix = ("radix", 64, np.float32)
    high = body.add("Round", body.add("Div", plain, radix, name="share"), name="high")
    low = body.add("Sub", plain, body.add("Mul", high, radix, name="rounded"), name="low")
    codes, largest = _codes_of_rows(body)
    sums = []
    for part in (high, low):
        stored = body.add("Cast", part, name=f"{part}_int8", to=TensorProto.INT8)
        sums.append(body.add("MatMulInteger", codes, stored, MIDDLE, name=f"{part}_sum"))
    total = body.add("Mul", sums[0], ("radix_int32", 64, np.int32), name="high_total")
    total = body.add("Add", total, sums[1], name="total")
    total = body.add("Cast", total, name="total_f32", to=TensorProto.FLOAT)
    units = body.add("Mul", total, body.add("Mul", "scale", CODE_STEP, name="steps"), name="units")
    body.add("Mul", units, largest, name="y")
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_function(DOMAIN, GROUPED, ["x", "weight", "scale"], ["y"], body.nodes, opsets)


def embedded(nodes: Nodes, ids: str, table: str, dtype: int, hidden_in_panels: int | None) -> str:
    """Rows of an int8 table for ids [b, s] -> [b, s, hidden].

    The table has the layout of lm_head's, and may be the same bytes: [hidden, vocab], or with
    `hidden_in_panels` panels as a list of fours [n, 4], of which a token has one in every 32.
    """
    if hidden_in_panels is None:
        codes = nodes.add("Gather", table, ids, name="embedding_codes", axis=1)  # [hidden, b, s]
        codes = nodes.add("Transpose", codes, name="embedding_rows", perm=[1, 2, 0])
    else:
        padded, fours = -(-hidden_in_panels // BLOCK) * (BLOCK // 4), np.arange(-(-hidden_in_panels // 4))
        panel = nodes.add("Div", ids, ("panel_columns", 32), name="embedding_panel")
        before = nodes.add("Mul", panel, ("fours_of_panel", padded * 32), name="embedding_before")
        first = nodes.add("Add", before, ids, name="embedding_first")
        first = nodes.add("Unsqueeze", first, ("axis_2", [2]), name="embedding_first_last")
        places = nodes.add("Add", first, ("fours_of_token", fours * 32), name="embedding_places")
        codes = nodes.add("Gather", table, places, name="embedding_codes")  # [b, s, hidden / 4, 4]
        codes = nodes.add("Reshape", codes, ("flat_fours", [0, 0, -1]), name="embedding_rows")
        if hidden_in_panels % 4:
            start, end = ("panel_start", [0]), ("hidden_size", [hidden_in_panels])
            codes = nodes.add("Slice", codes, start, end, ("axis_2", [2]), name="embedding_trimmed")
    plain = nodes.add("Cast", codes, name="embedding_plain", to=dtype)
    scale = nodes.add("Gather", f"{table}_scale", ids, name="embedding_scale")
    scale = nodes.add("Unsqueeze", scale, ("axis_2", [2]), name="embedding_scale_last")
    return nodes.add("Mul", plain, scale, name="embedding")


def write_predictions(nodes: Nodes, logits: str, metrics: bool, top_k: int, *, in_one_pass: bool) -> None:
    """Write the outputs for logits [b, o, vocab], in the current scope. `in_one_pass`: with operators that
    are fast on a CPU.
    """
    last = nodes.constant(*LAST_AXIS)
    top = _best(nodes, logits, in_one_pass)
    shifted = nodes.add("Sub", logits, top, name="shifted")
    weights = nodes.add("Exp", shifted, name="weights")
    total = nodes.add("ReduceSum", weights, last, name="partition", keepdims=0)
    nodes.add("Reciprocal", total, name="confidence_node", output=nodes.local("confidence"))
    if metrics:
        _metrics(nodes, logits, shifted, weights, total)
    if top_k:
        _top_k(nodes, top_k, shifted, total)


def _best(nodes: Nodes, logits: str, in_one_pass: bool) -> str:
    """Write `token_ids`, the first of the largest logits, and return that logit [b, o, 1].

    On a CPU, TopK computes both in one pass, and also chooses the first of equal logits.
    """
    ids = nodes.local("token_ids")
    if in_one_pass:
        both = [nodes.local("top_logit"), nodes.local("top_id")]
        top, place = nodes.add_many("TopK", logits, ("one_best", [1]), name="best", outputs=both, axis=-1)
        nodes.add("Squeeze", place, LAST, name="argmax", output=ids)
        return top
    nodes.add("ArgMax", logits, name="argmax", output=ids, axis=-1, keepdims=0)
    # Not ReduceMax: on CUDA it takes 3 ms for 16 outputs, ten times as long as all layers' attention.
    place = nodes.add("Unsqueeze", ids, LAST, name="top_id")
    return nodes.add("GatherElements", logits, place, name="top_logit", axis=-1)


def _metrics(nodes: Nodes, logits: str, shifted: str, weights: str, total: str) -> None:
    both = [nodes.local("top2_logits"), nodes.local("top2_ids")]
    best, _ = nodes.add_many("TopK", logits, ("two", [2]), name="top2", outputs=both, axis=-1)
    first, second = nodes.split(best, ("ones", [1, 1]), ("top1", "top2"), "top2_split")
    ratio = nodes.add("Exp", nodes.add("Sub", second, first, name="top_gap"), name="top_ratio_1")
    ratio = nodes.add("Squeeze", ratio, LAST, name="top_ratio")
    share = nodes.add("Sub", ("one_f32", 1.0, np.float32), ratio, name="top_share")
    confidence = nodes.local("confidence")
    nodes.add("Mul", confidence, share, name="margin_node", output=nodes.local("margin"))
    expected = nodes.add(
        "ReduceSum",
        nodes.add("Mul", weights, shifted, name="weighted"),
        LAST,
        name="weighted_sum",
        keepdims=0,
    )
    mean = nodes.add("Div", expected, total, name="mean_shifted")
    nodes.add(
        "Sub",
        nodes.add("Log", total, name="log_partition"),
        mean,
        name="entropy_node",
        output=nodes.local("entropy"),
    )


def _top_k(nodes: Nodes, top_k: int, shifted: str, total: str) -> None:
    """The most likely tokens of each output, best first, and their natural log-probabilities."""
    both = [nodes.local("topk_shifted"), nodes.local("topk_ids")]
    best, _ = nodes.add_many("TopK", shifted, ("num_topk", [top_k]), name="topk", outputs=both, axis=-1)
    wide = nodes.add("Unsqueeze", total, LAST, name="partition_column")
    nodes.add(
        "Sub",
        best,
        nodes.add("Log", wide, name="log_partition_column"),
        name="topk_logprobs_node",
        output=nodes.local("topk_logprobs"),
    )
