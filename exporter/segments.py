"""Runs a step graph a few layers at a time, so that checking a large model takes the memory of a few layers. Knows names; no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from mars_export.exporter.family import Dims
from mars_export.exporter.graph import StepGraph, hidden_after
from mars_export.exporter.weights import NUMPY_DTYPES, ONNX_DTYPES
from mars_export.runtime.ort import Results, open_graph

WHOLE = 1 << 28  # a model of more weights is run in segments
SEGMENT = 1 << 26  # weights of a segment, if it is more than one layer


def count_weights(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values())


def run(
    scratch: Path, graph: onnx.ModelProto, spec: StepGraph, layers: int, outputs: Sequence[str], level: int, sequences: Sequence[Sequence[int]]
) -> list[dict[str, np.ndarray]]:
    """The graph's `outputs` for each token sequence, which goes in as two steps of one row; axis 1 counts its tokens.

    `scratch` is where each segment, at most `layers` layers, is saved for ONNX Runtime to read; the weights must lie beside it.
    """
    rows = [_Row(ids, spec.dims, graph.graph.input[-1].type.tensor_type.elem_type, spec.kv_layout == "delta") for ids in sequences]
    for model in segments(graph, spec.dims, layers, outputs):
        onnx.save(model, scratch)
        # The vocabulary table, widened, is the largest weight by far; int4 and int8 codes have no fast product unpacked.
        is_large = spec.quantization is None and model.graph.output[0].name in outputs
        execute = open_graph(scratch, level, pack=not is_large)
        for row in rows:
            row.advance(model, execute)
        del execute  # its memory goes before the next segment comes
    return [row.results(outputs) for row in rows]


def segments(graph: onnx.ModelProto, dims: Dims, layers: int, outputs: Sequence[str]) -> Iterator[onnx.ModelProto]:
    """The graph in parts: layers by the `layers`, the last part is everything after them. Hidden states go from one to the next."""
    before: list[str] = []
    for first in range(0, dims.num_layers, layers):
        last = min(first + layers, dims.num_layers)
        present = [f"present.{i}.{kind}" for i in range(first, last) for kind in ("key", "value")]
        after = [hidden_after(last - 1)]
        yield _cut(graph, before, [*after, *present])
        before = after
    yield _cut(graph, before, outputs)


def _cut(model: onnx.ModelProto, given: Sequence[str], wanted: Sequence[str]) -> onnx.ModelProto:
    """The nodes that `wanted` values need, with the values `given` as additional inputs. Weights stay where they lie."""
    graph = model.graph
    needed, kept = set(wanted), []
    for node in reversed(graph.node):
        if any(name in needed and name not in given for name in node.output):
            kept.append(node)
            needed |= set(node.input)
    kept.reverse()
    kind = graph.input[-1].type.tensor_type.elem_type  # of KV memory, and so of hidden states
    known = {info.name: info for info in [*graph.input, *graph.output]}
    inputs = [info for info in graph.input if info.name in needed]
    inputs += [helper.make_tensor_value_info(name, kind, None) for name in given]
    results = [known.get(name) or helper.make_tensor_value_info(name, kind, None) for name in wanted]
    part = helper.make_graph(kept, "segment", inputs, results, [t for t in graph.initializer if t.name in needed])
    return helper.make_model(part, opset_imports=model.opset_import, ir_version=model.ir_version)


class _Row:
    """One token sequence on its way through the segments: its two steps' values, and its KV memory."""

    def __init__(self, ids: Sequence[int], dims: Dims, kv_kind: int, delta: bool) -> None:
        half = max(1, len(ids) // 2)
        self.delta = delta
        self.spans = [span for span in ((0, half), (half, len(ids))) if span[1] > span[0]]
        self.values: list[dict[str, np.ndarray]] = [
            {
                "input_ids": np.array([ids[a:b]], np.int64),
                "kv_length": np.array([a], np.int64),
                "output_index": np.arange(b - a, dtype=np.int64)[None],
            }
            for a, b in self.spans
        ]
        dtype = next(NUMPY_DTYPES[name] for name, kind in ONNX_DTYPES.items() if kind == kv_kind)
        shape = (1, dims.num_kv_heads, len(ids), dims.head_dim)
        self.memory = {f"{i}.{kind}": np.zeros(shape, dtype) for i in range(dims.num_layers) for kind in ("key", "value")}

    def advance(self, model: onnx.ModelProto, execute: Callable[[Mapping[str, np.ndarray]], Results]) -> None:
        """Run a segment on both steps."""
        names = [info.name for info in model.graph.input]
        for (start, stop), values in zip(self.spans, self.values, strict=True):
            memory = {f"past_key_values.{name}": buffer for name, buffer in self.memory.items()}
            for name, value in execute({name: memory[name] if name in memory else values[name] for name in names}).items():
                if not name.startswith("present."):
                    values[name] = value
                elif self.delta:
                    self.memory[name.removeprefix("present.")][:, :, start:stop] = value
                else:
                    self.memory[name.removeprefix("present.")] = value

    def results(self, outputs: Sequence[str]) -> dict[str, np.ndarray]:
        return {name: np.concatenate([values[name] for values in self.values], 1) for name in outputs}
