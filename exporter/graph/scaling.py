"""Factors, caps, activations and growing queries. Each adds no node if its quirk is off."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import TensorProto

from ..checkpoint.architecture.quirks import Quirks
from .nodes import Nodes

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


def activated(nodes: Nodes, quirks: Quirks, gate: str, kind: np.dtype, is_plain: bool) -> str:
    """The activation of the MLP's gate. `is_plain`: without the operator Gelu, which opset 18 lacks."""
    if quirks.activation == "silu":
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

    Its `softcap` is not used: ONNX Runtime 1.24 to 1.26 mask before they cap, so that nothing is masked (1.31
    is right). Capped scores are computed with plain operators.
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
