"""Symbolic dimensions of a step graph given numbers: TensorRT's KV_CACHE_UPDATE wants a fixed capacity.

The weights stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx


def fixed(model: onnx.ModelProto, sizes: Mapping[str, int]) -> onnx.ModelProto:
    """A copy of `model` whose inputs and outputs have numbers for the named symbols."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for info in [*copy.graph.input, *copy.graph.output]:
        for dimension in info.type.tensor_type.shape.dim:
            if dimension.dim_param in sizes:
                dimension.dim_value = sizes[dimension.dim_param]
    return copy
