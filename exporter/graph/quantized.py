"""The nodes of quantized Linear maps and embeddings, in standard operators."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..codes import Codec
from .nodes import Nodes

DOMAIN, PRODUCT = "mars_export", "QuantizedMatMul"  # the operator of mars-export-kernels


def dequantized(nodes: Nodes, x: str, weight: str, codec: Codec, name: str) -> str:
    """x [..., in] times the decoded weight [in, out].

    ONNX Runtime and TensorRT fuse the pair into one kernel.
    """
    inputs = [weight, f"{weight}_scale"] + ([] if codec.symmetric else [f"{weight}_zero_point"])
    axis, block_size = (1, 0) if codec.group_size is None else (0, codec.group_size)
    decoded = nodes.add("DequantizeLinear", *inputs, name=f"{name}_weight", axis=axis, block_size=block_size)
    return nodes.add("MatMul", x, decoded, name=name)


def integer_product(nodes: Nodes, x: str, weight: str, name: str, opset: int) -> str:
    """x [..., in] fp32 times an int8 weight [in, out]. Each row of x has its own scale, so that rows do not
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
    its largest number, zero, makes its products zero, which saves a node.
    """
    body = Nodes()
    step, middle = (
        body.add("Constant", name=name, value=numpy_helper.from_array(value))
        for name, value in (("code_step", np.array(1 / 127, np.float32)), ("middle", np.array(128, np.uint8)))
    )
    last_axis = body.add("Constant", name="last_axis", value_ints=[-1])
    largest = body.add("ReduceMax", body.add("Abs", "x", name="abs"), last_axis, name="row", keepdims=1)
    unit = body.add("Div", "x", largest, name="unit")
    codes = body.add("QuantizeLinear", unit, step, middle, name="codes")
    decoded = body.add("DequantizeLinear", codes, step, middle, name="decoded")
    matrix = body.add("DequantizeLinear", "weight", "scale", name="matrix", axis=1)
    body.add("Mul", body.add("MatMul", decoded, matrix, name="units"), largest, name="y")
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_function(DOMAIN, PRODUCT, ["x", "weight", "scale"], ["y"], body.nodes, opsets)


def embedded(nodes: Nodes, ids: str, table: str, dtype: int) -> str:
    """Rows of an int8 table [hidden, vocab] for ids [b, s] -> [b, s, hidden].

    The table has the layout of lm_head's, and may be the same table.
    """
    codes = nodes.add("Gather", table, ids, name="embedding_codes", axis=1)  # [hidden, b, s]
    codes = nodes.add("Transpose", codes, name="embedding_rows", perm=[1, 2, 0])
    plain = nodes.add("Cast", codes, name="embedding_plain", to=dtype)
    scale = nodes.add("Gather", f"{table}_scale", ids, name="embedding_scale")
    scale = nodes.add("Unsqueeze", scale, ("axis_2", [2]), name="embedding_scale_last")
    return nodes.add("Mul", plain, scale, name="embedding")
