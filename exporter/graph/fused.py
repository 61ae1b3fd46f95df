"""The parts of a decoder layer before and after its attention, as model functions that one node each calls.

ONNX Runtime replaces such a node by the function's nodes, unless the session has the operator of
mars-export-kernels, which has the function's name. The products in it are calls of QuantizedMatMul, for
packages that have no other operator.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import AttributeProto, helper

from ..checkpoint.dims import Dims
from ..checkpoint.families import PRE
from . import heads, operators
from .nodes import Body, Nodes
from .operators import DOMAIN, integer_product
from .weights import NUMPY_DTYPES

START, END = "LayerStart", "LayerEnd"
START_INPUTS = ["hidden", "norm", "qkv", "qkv_scale", "cos", "sin"]  # and "bias", if the model has one
END_INPUTS = ["attended", "hidden", "attention_output", "attention_output_scale", "norm"]
END_INPUTS += ["gate_up", "gate_up_scale", "down", "down_scale"]


def fits(dims: Dims) -> bool:
    """Whether the functions express the model's layers: those of Llama, and of Qwen2 with its bias."""
    quirks = dims.quirks
    is_usual = quirks.norms == PRE and quirks.head_norms is None and quirks.activation == "silu"
    ropes = [dims.rope(layer) for layer in range(dims.num_layers)]
    rotates_whole_heads = all(rope is not None and 2 * len(rope.inv_freq) == dims.head_dim for rope in ropes)
    has_other_nodes = quirks.interleaved or quirks.residual_factor != 1 or dims.output_bias or dims.mlp_bias
    has_panels = dims.intermediate_size % 32 == 0  # of gate and of up, each
    return is_usual and rotates_whole_heads and has_panels and not has_other_nodes


def layer_start(nodes: Nodes, dims: Dims, i: int, hidden: str, opset: int) -> list[str]:
    """Layer i's q [b, heads, s, d], k and v [b, kv_heads, s, d] of hidden [b, s, hidden]."""
    if START not in nodes.functions:
        body = Body()
        nodes.functions |= {START: _start(body, dims, opset)} | body.functions
    weight, angles = f"layers.{i}.qkv.weight", heads.angles(dims, i)
    inputs = [hidden, f"layers.{i}.input_norm.weight", weight, f"{weight}_scale", *angles]
    return nodes.add_many(
        START,
        *inputs,
        *([f"layers.{i}.qkv.bias"] if dims.qkv_bias else []),
        name="start",
        outputs=list(map(nodes.local, "qkv")),
        domain=DOMAIN,
        epsilon=dims.rms_norm_eps,
        num_heads=dims.num_heads,
        num_kv_heads=dims.num_kv_heads,
    )


def layer_end(nodes: Nodes, dims: Dims, i: int, hidden: str, attended: str, output: str, opset: int) -> str:
    """Layer i's output [b, s, hidden], of its input `hidden` and of `attended` [b, s, heads d]."""
    if END not in nodes.functions:
        body = Body()
        nodes.functions |= {END: _end(body, dims, opset)} | body.functions
    names = (f"layers.{i}.{name}.weight" for name in ("attention_output", "gate_up", "down"))
    attention_output, gate_up, down = ((name, f"{name}_scale") for name in names)
    norm = f"layers.{i}.post_norm.weight"
    inputs = (attended, hidden, *attention_output, norm, *gate_up, *down)
    epsilon = dims.rms_norm_eps
    return nodes.add(END, *inputs, name="end", output=output, domain=DOMAIN, epsilon=epsilon)


def _start(body: Body, dims: Dims, opset: int) -> onnx.FunctionProto:
    packed = integer_product(body, _norm(body, "hidden"), "qkv", "packed", opset)
    if dims.qkv_bias:
        packed = body.add("Add", packed, "bias", name="packed_biased")
    outputs = heads.split_heads(body, dims, 0, packed, lambda x, _module, _name: x, is_appended=False)
    inputs = START_INPUTS + (["bias"] if dims.qkv_bias else [])
    return _function(START, inputs, outputs, body, opset, ["epsilon", "num_heads", "num_kv_heads"])


def _end(body: Body, dims: Dims, opset: int) -> onnx.FunctionProto:
    added = integer_product(body, "attended", "attention_output", "attention_added", opset)
    middle = body.add("Add", "hidden", added, name="middle")
    packed = integer_product(body, _norm(body, middle), "gate_up", "packed", opset)
    sizes = ("gate_up_sizes", [dims.intermediate_size] * 2)
    gate, up = body.split(packed, sizes, ("gate", "up"), "gate_up_split")
    active = operators.activated(body, dims.quirks, gate, NUMPY_DTYPES["float32"], False)
    gated = body.add("Mul", active, up, name="gated")
    added = integer_product(body, gated, "down", "mlp_added", opset)
    body.add("Add", middle, added, name="output")
    return _function(END, END_INPUTS, ["output"], body, opset, ["epsilon"])


def _norm(body: Nodes, x: str) -> str:
    name = body.add("RMSNormalization", x, "norm", name="normed")
    epsilon = AttributeProto(name="epsilon", ref_attr_name="epsilon", type=AttributeProto.FLOAT)
    body.nodes[-1].attribute.append(epsilon)
    return name


def _function(
    name: str, inputs: list[str], outputs: Sequence[str], body: Nodes, opset: int, attributes: list[str]
) -> onnx.FunctionProto:
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_function(DOMAIN, name, inputs, outputs, body.nodes, opsets, attributes)
