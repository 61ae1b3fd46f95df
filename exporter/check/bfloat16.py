"""Rewrites a bfloat16 graph for ONNX Runtime's CPU: fp32 operators with rounded results."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

# Operators that only move values, so that their results need no rounding.
MOVES = {
    "Concat",
    "Gather",
    "GatherND",
    "Identity",
    "Reshape",
    "Split",
    "TensorScatter",
    "Transpose",
    "Unsqueeze",
}


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of `model` in which fp32 numbers, rounded to bfloat16, stand in for bfloat16 values. Its KV
    tensors are fp32.

    ONNX Runtime has no bfloat16 kernels for CPUs. A GPU also computes in a wider type inside an operator and
    rounds the result, so the copy shows what the precision does to the model. Sums in another order may
    still differ in the last place.
    """
    kinds = _kinds(model)
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    graph = wide.graph
    nodes: list[onnx.NodeProto] = []
    wide_names = {}
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.BFLOAT16:
            wide_names[tensor.name] = f"{tensor.name}_f32"
            nodes.append(_cast(tensor.name, wide_names[tensor.name], TensorProto.FLOAT))
    for node in graph.node:
        node.input[:] = [wide_names.get(name, name) for name in node.input]
        rounded = (
            []
            if node.op_type in MOVES
            else [name for name in node.output if kinds.get(name) == TensorProto.BFLOAT16]
        )
        node.output[:] = [f"{name}_exact" if name in rounded else name for name in node.output]
        if node.op_type == "Cast" and rounded:
            node.attribute[0].i = TensorProto.FLOAT
        nodes.append(node)
        for name in rounded:
            nodes.append(_cast(f"{name}_exact", f"{name}_bf16", TensorProto.BFLOAT16))
            nodes.append(_cast(f"{name}_bf16", name, TensorProto.FLOAT))
    del graph.node[:]
    graph.node.extend(nodes)
    for info in [*graph.input, *graph.output]:
        if info.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            info.type.tensor_type.elem_type = TensorProto.FLOAT
    return wide


def _kinds(model: onnx.ModelProto) -> dict[str, int]:
    graph = onnx.shape_inference.infer_shapes(model).graph
    return {info.name: info.type.tensor_type.elem_type for info in [*graph.value_info, *graph.output]}


def _cast(source: str, target: str, to: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [target], name=f"cast_{target}", to=to)
