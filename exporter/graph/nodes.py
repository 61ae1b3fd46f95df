"""Collects nodes and constants for writing an ONNX graph by hand, and fixes the sizes of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

Value = str | tuple[Any, ...]
"""The name of a value, or the arguments of `Nodes.constant` for one."""


class Nodes:
    """The nodes and small constants of one graph. Methods that add a value return its name."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.functions: dict[str, onnx.FunctionProto] = {}
        self._scope = ""

    def scope(self, name: str) -> None:
        """Prefix the names of the nodes that follow."""
        self._scope = f"{name}." if name else ""

    def add(self, op: str, *inputs: Value, name: str, output: str | None = None, **attributes: Any) -> str:
        """Add a node with one output, called `output` or its scoped `name`."""
        return self.add_many(
            op, *inputs, name=name, outputs=[output or f"{self._scope}{name}"], **attributes
        )[0]

    def add_many(
        self, op: str, *inputs: Value, name: str, outputs: Sequence[str], **attributes: Any
    ) -> list[str]:
        """Add a node with several outputs, whose names are used as they are."""
        names = [value if isinstance(value, str) else self.constant(*value) for value in inputs]
        self.nodes.append(
            helper.make_node(op, names, list(outputs), name=f"{self._scope}{name}", **attributes)
        )
        return list(outputs)

    def split(self, x: str, sizes: Value, parts: Sequence[str], name: str, axis: int = -1) -> list[str]:
        """Split x into `parts`, whose names get the current scope."""
        return self.add_many("Split", x, sizes, name=name, outputs=list(map(self.local, parts)), axis=axis)

    def local(self, name: str) -> str:
        """`name` in the current scope."""
        return f"{self._scope}{name}"

    def embed(self, inner: Nodes, outer: Mapping[str, str]) -> None:
        """Add the nodes of another graph in the current scope. `outer` are the values here for its inputs, by
        their names there.
        """
        own = {name for node in inner.nodes for name in node.output}
        for node in inner.nodes:
            node.name = self.local(node.name)
            node.input[:] = [self.local(n) if n in own else outer.get(n, n) for n in node.input]
            node.output[:] = [self.local(n) for n in node.output]
        self.nodes += inner.nodes
        for name, tensor in inner.constants.items():
            assert self.constants.setdefault(name, tensor) == tensor, f"constant {name} has two values"
        self.functions |= inner.functions

    def cast(self, names: Iterable[str], dtype: int) -> None:
        """Read the weights `names` in the type `dtype`. ONNX Runtime casts them once, when it loads the
        graph.
        """
        wider = {name: f"{name}.cast" for name in names}
        for node in self.nodes:
            node.input[:] = [wider.get(name, name) for name in node.input]
        self.nodes[:0] = [
            helper.make_node("Cast", [name], [cast], name=cast, to=dtype) for name, cast in wider.items()
        ]

    def constant(self, name: str, value: Any, dtype: Any = np.int64) -> str:
        """A graph constant; the same name must always mean the same value."""
        array = np.asarray(value, dtype)
        tensor = numpy_helper.from_array(array, name)
        known = self.constants.setdefault(name, tensor)
        assert known == tensor, f"constant {name} has two values"
        return name


class Body(Nodes):
    """The nodes of a function, where constants are nodes, too."""

    def constant(self, name: str, value: Any, dtype: Any = np.int64) -> str:
        if name not in self.constants:
            tensor = numpy_helper.from_array(np.asarray(value, dtype), name)
            self.nodes.append(helper.make_node("Constant", [], [name], name=name, value=tensor))
        return super().constant(name, value, dtype)


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
