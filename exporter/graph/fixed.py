"""Numbers for the symbolic dimensions of a step graph, so that no shape depends on data: for compilers of
accelerators, and for TensorRT, whose KV_CACHE_UPDATE needs a fixed capacity.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import numpy_helper


def fixed(model: onnx.ModelProto, sizes: Mapping[str, int]) -> onnx.ModelProto:
    """A copy of `model` with numbers for the named symbols. It refers to the same weights file."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    for info in [*graph.input, *graph.output]:
        for dimension in info.type.tensor_type.shape.dim:
            if dimension.dim_param in sizes:
                dimension.dim_value = sizes[dimension.dim_param]
    for name in (name for name in ("slots", "capacity") if name in sizes):
        # Their indices need no arithmetic on shapes.
        indices = f"{name}_indices"
        nodes = [n for n in graph.node if n.output[0] not in (f"num_{name}_1d", f"num_{name}", indices)]
        del graph.node[:]
        graph.node.extend(nodes)
        graph.initializer.append(numpy_helper.from_array(np.arange(sizes[name]), indices))
    used = {name for node in graph.node for name in node.input}
    constants = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(constants)
    return copy
