"""The nodes of quantized Linear maps and embeddings, in standard operators."""

from __future__ import annotations

import numpy as np

from ..codes import Codec
from .nodes import Nodes


def dequantized(nodes: Nodes, x: str, weight: str, codec: Codec, name: str) -> str:
    """x [..., in] times the decoded weight [in, out].

    ONNX Runtime and TensorRT fuse the pair into one kernel.
    """
    inputs = [weight, f"{weight}_scale"] + ([] if codec.symmetric else [f"{weight}_zero_point"])
    axis, block_size = (1, 0) if codec.group_size is None else (0, codec.group_size)
    decoded = nodes.add("DequantizeLinear", *inputs, name=f"{name}_weight", axis=axis, block_size=block_size)
    return nodes.add("MatMul", x, decoded, name=name)


def integer_product(nodes: Nodes, x: str, weight: str, name: str) -> str:
    """x [..., in] fp32 times an int8 weight [in, out]. Each row of x has its own scale, so that rows do not
    affect each other.

    A row is divided by its largest number, so that the scale of its codes is a constant: ONNX Runtime then
    fuses everything from DequantizeLinear to MatMul into one kernel. Codes are unsigned, around 128, because
    unsigned times signed bytes is the fast product. The codes of a row of zeros are arbitrary (0 / 0), but
    its largest number, zero, makes its products zero, which saves a node.
    """
    largest = nodes.add(
        "ReduceMax",
        nodes.add("Abs", x, name=f"{name}_abs"),
        nodes.constant("last_axis", [-1]),
        name=f"{name}_row",
        keepdims=1,
    )
    step = (nodes.constant("code_step", 1 / 127, np.float32), nodes.constant("middle", 128, np.uint8))
    codes = nodes.add(
        "QuantizeLinear", nodes.add("Div", x, largest, name=f"{name}_unit"), *step, name=f"{name}_codes"
    )
    decoded = nodes.add("DequantizeLinear", codes, *step, name=f"{name}_decoded")
    matrix = nodes.add("DequantizeLinear", weight, f"{weight}_scale", name=f"{name}_weight", axis=1)
    return nodes.add("Mul", nodes.add("MatMul", decoded, matrix, name=f"{name}_units"), largest, name=name)


def embedded(nodes: Nodes, ids: str, table: str, dtype: int) -> str:
    """Rows of an int8 table [hidden, vocab] for ids [b, s] -> [b, s, hidden].

    The table has the layout of lm_head's, and may be the same table.
    """
    codes = nodes.add("Gather", table, ids, name="embedding_codes", axis=1)  # [hidden, b, s]
    codes = nodes.add("Transpose", codes, name="embedding_rows", perm=[1, 2, 0])
    plain = nodes.add("Cast", codes, name="embedding_plain", to=dtype)
    scale = nodes.add("Gather", f"{table}_scale", ids, name="embedding_scale")
    scale = nodes.add("Unsqueeze", scale, nodes.constant("axis_2", [2]), name="embedding_scale_last")
    return nodes.add("Mul", plain, scale, name="embedding")
