"""Prepares a step graph for TensorRT: numbers for symbolic dimensions (KV_CACHE_UPDATE needs a fixed
capacity), and no shapes that depend on data.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from .drafts import computed_everywhere


def fixed(model: onnx.ModelProto, sizes: Mapping[str, int]) -> onnx.ModelProto:
    """A copy of `model` with numbers for the named symbols. It refers to the same weights file."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    computed_everywhere(copy)
    for info in [*copy.graph.input, *copy.graph.output]:
        for dimension in info.type.tensor_type.shape.dim:
            if dimension.dim_param in sizes:
                dimension.dim_value = sizes[dimension.dim_param]
    return copy
