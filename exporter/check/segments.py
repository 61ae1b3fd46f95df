"""Runs a step graph whole, or a few layers at a time to check a large model in little memory.

A bfloat16 graph runs in fp32 operators with rounded results, because ONNX Runtime's CPU has no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from ...runtime.device.ort.library import Results, open_graph
from ..checkpoint import names
from ..checkpoint.dims import Dims
from ..graph.spec import GraphSpec
from ..graph.step import HEAD_INPUT, HEAD_PRODUCT, hidden_after

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
    inferred = onnx.shape_inference.infer_shapes(model).graph
    infos = [*inferred.value_info, *inferred.output]
    kinds = {info.name: info.type.tensor_type.elem_type for info in infos}
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


def _cast(source: str, target: str, to: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [target], name=f"cast_{target}", to=to)


WHOLE = 1 << 28  # a model of more weights is run in segments
SEGMENT = 1 << 26  # weights of a segment, if it is more than one layer
HEAD_PART = 1 << 25  # weights of the vocabulary table that are multiplied at once, if they are floats


def count_weights(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values())


def layers_at_once(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """How many layers of a large model run together; None for a model that runs whole."""
    if count_weights(shapes) <= WHOLE:
        return None
    first = {name: shape for name, shape in shapes.items() if name.startswith(names.layer(0))}
    return max(1, SEGMENT // count_weights(first))


def run(
    scratch: Path,
    graph: onnx.ModelProto,
    spec: GraphSpec,
    layers: int | None,
    outputs: Sequence[str],
    level: int,
    sequences: Sequence[Sequence[int]],
    progress: Callable[[int], None] | None = None,
) -> list[dict[str, np.ndarray]]:
    """The graph's `outputs` for each token sequence, with its tokens on axis 0. Each sequence is one row of
    two steps. `progress` is called with the number of layers of each segment.

    Each segment has at most `layers` layers (None: the whole graph). It is saved to `scratch`, in the
    directory of the weights, for ONNX Runtime to read.
    """
    rows = _Rows(sequences, spec.dims, graph.graph.input[-1], spec.options.is_appended)
    parts = [graph] if layers is None else segments(graph, spec.dims, layers, outputs)
    # Packing pays off for codes, but not for float weights that are used for a few products only.
    quantization = spec.options.quantization
    pack = layers is None or quantization is not None
    is_integer = quantization is not None and quantization.is_integer
    left = spec.dims.num_layers
    try:
        for model in parts:
            onnx.save(model, scratch)
            execute = open_graph(scratch, level, pack=pack, exact=is_integer)
            rows.advance(model, execute)
            del execute  # free its memory before the next segment is loaded
            if progress is not None and left:
                progress(min(left, layers or left))
                left -= min(left, layers or left)
    finally:
        scratch.unlink(missing_ok=True)
    return rows.results(outputs)


def segments(
    graph: onnx.ModelProto, dims: Dims, layers: int, outputs: Sequence[str]
) -> Iterator[onnx.ModelProto]:
    """The graph in parts of `layers` layers, then all that follows them. Parts pass on hidden states."""
    before: list[str] = []
    for first in range(0, dims.num_layers, layers):
        last = min(first + layers, dims.num_layers)
        layers_of_part = {f"present.{i}" for i in range(first, last)}
        present = [info.name for info in graph.graph.output if info.name.rpartition(".")[0] in layers_of_part]
        after = [hidden_after(last - 1)]
        yield _cut(graph, before, [*after, *present])
        before = after
    yield from _tail(graph, dims, before, outputs)


def _tail(
    graph: onnx.ModelProto, dims: Dims, before: Sequence[str], outputs: Sequence[str]
) -> Iterator[onnx.ModelProto]:
    """The graph after the layers.

    ONNX Runtime converts a float table to fp32, so it is multiplied in blocks of rows; codes in one piece.
    """
    product = _cut(graph, [HEAD_INPUT], [HEAD_PRODUCT])
    tables = [
        tensor
        for tensor in product.graph.initializer
        if tuple(tensor.dims) == (dims.vocab_size, dims.hidden_size)
    ]
    if len(tables) != len(product.graph.initializer):
        yield _cut(graph, before, outputs)
        return
    yield _cut(graph, before, [HEAD_INPUT])
    [table] = tables
    place = {entry.key: entry for entry in table.external_data}
    start, width = int(place["offset"].value), int(place["length"].value) // dims.vocab_size
    rows = max(1, HEAD_PART // dims.hidden_size)
    for first in range(0, dims.vocab_size, rows):
        count = min(rows, dims.vocab_size - first)
        table.dims[0] = count
        place["offset"].value, place["length"].value = str(start + first * width), str(count * width)
        yield product
    yield _cut(graph, [HEAD_PRODUCT], outputs)


def _cut(model: onnx.ModelProto, inputs: Sequence[str], outputs: Sequence[str]) -> onnx.ModelProto:
    """The nodes that `outputs` need, with `inputs` as additional inputs. The weights file is shared."""
    graph = model.graph
    needed, nodes = set(outputs), []
    for node in reversed(graph.node):
        if any(name in needed and name not in inputs for name in node.output):
            nodes.append(node)
            needed |= set(node.input)
    nodes.reverse()
    kv_kind = graph.input[-1].type.tensor_type.elem_type  # the last input is of KV entries
    kind = TensorProto.FLOAT if kv_kind == TensorProto.INT8 else kv_kind  # of hidden states
    known = {info.name: info for info in [*graph.input, *graph.output]}
    entries = [info for info in graph.input if info.name in needed]
    entries += [helper.make_tensor_value_info(name, kind, None) for name in inputs]
    results = [known.get(name) or helper.make_tensor_value_info(name, kind, None) for name in outputs]
    weights = [tensor for tensor in graph.initializer if tensor.name in needed]
    part = helper.make_graph(nodes, "segment", entries, results, weights)
    return helper.make_model(
        part, functions=model.functions, opset_imports=model.opset_import, ir_version=model.ir_version
    )


class _Rows:
    """Token sequences on their way through the segments, as rows of two steps, with their KV memory.

    Rows are padded to the longest of a step. The padding's KV entries come after all that a token attends to.
    """

    def __init__(
        self, sequences: Sequence[Sequence[int]], dims: Dims, kv: onnx.ValueInfoProto, appended: bool
    ) -> None:
        self.appended = appended
        halves = [max(1, len(ids) // 2) for ids in sequences]
        self.spans = [
            [(0, half) for half in halves],
            [(half, len(ids)) for half, ids in zip(halves, sequences, strict=True)],
        ]
        self.values: list[dict[str, np.ndarray]] = []
        longest = 0
        for spans in self.spans:
            slots = max(stop - start for start, stop in spans)
            fed = [
                [*ids[start:stop], *[0] * (slots - stop + start)]
                for ids, (start, stop) in zip(sequences, spans, strict=True)
            ]
            kv_length = np.array([start for start, _ in spans], np.int64)
            index = np.tile(np.arange(slots, dtype=np.int64), (len(fed), 1))
            self.values.append(
                {"input_ids": np.array(fed, np.int64), "kv_length": kv_length, "output_index": index}
            )
            # All slots have outputs, so that a step's tokens are in no state before the next one.
            self.values[-1]["state_length"] = np.zeros(len(fed), np.int64)
            longest = max(longest, int(kv_length.max()) + slots)
        if not self.values[1]["input_ids"].size:
            del self.values[1], self.spans[1]
        dtype = helper.tensor_dtype_to_np_dtype(kv.type.tensor_type.elem_type)
        width = kv.type.tensor_type.shape.dim[-1].dim_value
        shape = (len(sequences), dims.num_kv_heads, longest, width)
        self.memory = {
            f"{i}.{kind}": np.zeros(shape, dtype) for i in dims.kv_layers for kind in ("key", "value")
        }
        if (net := dims.recurrent) is not None:
            kept = net.kernel - 1 + max(values["input_ids"].shape[1] for values in self.values)
            sizes = {"inputs": (kept, net.entry), "state": (net.value_heads, net.key_dim, net.value_dim)}
            self.memory |= {
                f"{i}.{name}": np.zeros((len(sequences), *size), np.float32)
                for i in net.layers
                for name, size in sizes.items()
            }

    def advance(self, model: onnx.ModelProto, execute: Callable[[Mapping[str, np.ndarray]], Results]) -> None:
        """Run a segment on both steps."""
        inputs = [info.name for info in model.graph.input]
        for values in self.values:
            memory = {f"past_key_values.{name}": buffer for name, buffer in self.memory.items()}
            feeds = {name: memory[name] if name in memory else values[name] for name in inputs}
            for name, value in execute(feeds).items():
                if name == HEAD_PRODUCT and name in values:
                    values[name] = np.concatenate([values[name], value], -1)
                elif not name.startswith("present."):
                    values[name] = value
                elif self.appended:
                    entry = values["kv_length"][:, None] + np.arange(value.shape[2])
                    self.memory[name.removeprefix("present.")][np.arange(len(value))[:, None], :, entry] = (
                        value.transpose(0, 2, 1, 3)
                    )
                else:
                    self.memory[name.removeprefix("present.")] = value

    def results(self, outputs: Sequence[str]) -> list[dict[str, np.ndarray]]:
        def of(row: int, name: str) -> np.ndarray:
            steps = zip(self.values, self.spans, strict=True)
            return np.concatenate(
                [values[name][row, : spans[row][1] - spans[row][0]] for values, spans in steps]
            )

        return [{name: of(row, name) for name in outputs} for row in range(len(self.spans[0]))]
