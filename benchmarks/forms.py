"""Measures forms of the two parts of a step that all models have, each as a separate graph, in interleaved
rounds:

    python benchmarks/forms.py products            the four products of a layer of SmolLM2-135M's shape
    python benchmarks/forms.py tail                from logits to token and confidence

The result is the smallest time of all rounds: CPU time with --threads 1, wall clock with more. Weights are
random and different in each layer, so that they come from memory as in a model; inputs have outliers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from mars_export.exporter.codes import Codec, Encoded
from mars_export.exporter.graph.nodes import Nodes
from mars_export.exporter.graph.quantized import integer_product

SHAPES = (("qkv", 576, 960), ("attention_output", 576, 576), ("gate_up", 576, 3072), ("down", 1536, 576))
SLOTS = (1, 2, 4, 8, 15, 64)
VOCAB = 49152
OPSET, IR = 24, 11
CONTRIB = "com.microsoft"
FP32 = np.dtype(np.float32)


@dataclass
class Graph:
    """One form: its session, and what it is fed with."""

    session: onnxruntime.InferenceSession
    seconds: dict[int, float] = field(default_factory=dict)

    def run(
        self, slots: int, feeds: Mapping[str, np.ndarray], clock: Callable[[], float]
    ) -> list[np.ndarray]:
        begun = clock()
        results: list[np.ndarray] = self.session.run(None, dict(feeds))
        self.seconds[slots] = min(self.seconds.get(slots, 1e9), clock() - begun)
        return results


def session(nodes: Nodes, feeds: Mapping[str, Sequence[Any]], outputs: Sequence[str], threads: int) -> Graph:
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in feeds.items()]
    results = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph(nodes.nodes, "form", infos, results, [*nodes.constants.values()])
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    return Graph(
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    )


# --- products ---


def per_channel(nodes: Nodes, weight: np.ndarray, name: str) -> None:
    made = Codec("int7", None).encode(weight.T, FP32)
    nodes.constant(name, made.codes.reshape(weight.T.shape).T, np.int8)
    nodes.constant(f"{name}_scale", made.scales[:, 0], np.float32)


def by_row(nodes: Nodes, x: str, weight: np.ndarray, name: str) -> str:
    """As w8a8 bundles have it: each row its own scale."""
    per_channel(nodes, weight, f"{name}_w")
    return integer_product(nodes, x, f"{name}_w", name)


def by_tensor(nodes: Nodes, x: str, weight: np.ndarray, name: str) -> str:
    """One operator, and one scale for all rows: they disturb each other."""
    per_channel(nodes, weight, f"{name}_w")
    return nodes.add("DynamicQuantizeMatMul", x, f"{name}_w", f"{name}_w_scale", name=name, domain=CONTRIB)


def grouped(kind: str, size: int) -> Callable[[Nodes, str, np.ndarray, str], str]:
    """MatMulNBits at accuracy level 4: weights in groups, activations in codes for each group as it runs."""

    def form(nodes: Nodes, x: str, weight: np.ndarray, name: str) -> str:
        inputs, outputs = weight.shape
        filled = np.zeros((outputs, -(-inputs // size) * size), np.float32)
        filled[:, :inputs] = weight.T
        made: Encoded = Codec(kind, size).encode(filled, FP32)
        bits = 8 if kind == "int8" else 4
        codes = (made.codes.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
        if bits == 4:
            codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
        nodes.constant(f"{name}_w", codes, np.uint8)
        nodes.constant(f"{name}_s", made.scales.reshape(-1), np.float32)
        settings = {"K": inputs, "N": outputs, "bits": bits, "block_size": size, "accuracy_level": 4}
        return nodes.add("MatMulNBits", x, f"{name}_w", f"{name}_s", name=name, domain=CONTRIB, **settings)

    return form


FORMS: dict[str, Callable[[Nodes, str, np.ndarray, str], str]] = {
    "w8a8, a scale for each row": by_row,
    "w8a8, one scale (DynamicQuantizeMatMul)": by_tensor,
    "int8 in groups of 32": grouped("int8", 32),
    "int8 in groups of 128": grouped("int8", 128),
    "int4 in groups of 32": grouped("int4", 32),
    "int4 in groups of 64": grouped("int4", 64),
    "int4 in groups of 128": grouped("int4", 128),
}


def products(args: argparse.Namespace) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    weights = {
        (i, part): (draw.normal(0, 1, (k, n)) * np.exp(draw.normal(0, 0.3, (1, n))) / k**0.5).astype(FP32)
        for i in range(args.layers)
        for part, k, n in SHAPES
    }
    graphs = {}
    for form, write in FORMS.items():
        nodes, outputs = Nodes(), []
        for (i, part), weight in weights.items():
            name = f"layers.{i}.{part}"
            # An addition of zeros: each product has an input of its own, as in a model.
            zeros = nodes.constant(f"zeros_{len(weight)}", np.zeros(len(weight)), np.float32)
            x = nodes.add("Add", f"x{len(weight)}", zeros, name=f"{name}_x")
            outputs.append(write(nodes, x, weight, name))
        shapes = {f"x{k}": [1, "slots", k] for k in (576, 1536)}
        graphs[form] = session(nodes, shapes, outputs, args.threads)
    rows = (draw.normal(0, 1, (1, max(SLOTS), 1536)) * np.exp(draw.normal(0, 1, (1, 1, 1536)))).astype(FP32)

    def feeds(slots: int) -> dict[str, np.ndarray]:
        return {f"x{k}": np.ascontiguousarray(rows[:, :slots, :k]) for k in (576, 1536)}

    exact = [feeds(8)[f"x{len(weight)}"] @ weight for weight in weights.values()]
    errors, steady = {}, {}
    for form, graph in graphs.items():
        wide, narrow = (graph.run(slots, feeds(slots), perf_counter) for slots in (8, 1))
        errors[form] = float(np.mean([(a - b).std() / b.std() for a, b in zip(wide, exact, strict=True)]))
        steady[form] = all((a[0, 0] == b[0, 0]).all() for a, b in zip(wide, narrow, strict=True))
    measure(graphs, feeds, SLOTS, args)
    print("ms a layer, relative error, same bits at 1 and 8 slots")
    for form, graph in graphs.items():
        found = "  ".join(f"{slots}: {1000 * graph.seconds[slots] / args.layers:.3f}" for slots in SLOTS)
        print(f"{form:42} {found}  {errors[form]:.4f}  {steady[form]}")
    return {
        form: {
            "ms_a_layer": {str(s): round(1000 * graph.seconds[s] / args.layers, 4) for s in SLOTS},
            "error": round(errors[form], 5),
            "steady": steady[form],
        }
        for form, graph in graphs.items()
    }


# --- tail ---


def tail(args: argparse.Namespace) -> dict[str, Any]:
    graphs = {form: session(*tail_graph(form), args.threads) for form in TAILS}
    draw = np.random.default_rng(0)
    logits = draw.normal(0, 3, (1, max(SLOTS[:-1]), VOCAB)).astype(FP32)
    slots = SLOTS[:-1]
    measure(graphs, lambda count: {"raw": np.ascontiguousarray(logits[:, :count])}, slots, args)
    print("us from logits to token and confidence")
    for form, graph in graphs.items():
        print(f"{form:42} " + "  ".join(f"{s}: {1e6 * graph.seconds[s]:.0f}" for s in slots))
    return {form: {str(s): round(1e6 * g.seconds[s]) for s in slots} for form, g in graphs.items()}


TAILS = ("ArgMax and ReduceMax", "TopK", "ReduceLogSumExp", "Softmax, then TopK")


def tail_graph(form: str) -> tuple[Nodes, dict[str, list[Any]], list[str]]:
    nodes = Nodes()
    last, one = nodes.constant("last", [-1]), nodes.constant("one", [1])
    logits = nodes.add("Add", "raw", nodes.constant("bias", np.zeros(VOCAB), np.float32), name="logits")
    if form.startswith("Softmax"):
        shares = nodes.add("Softmax", logits, name="shares", axis=-1)
        top, place = nodes.add_many("TopK", shares, one, name="best", outputs=["top", "place"], axis=-1)
        nodes.add("Squeeze", place, last, name="token_ids")
        nodes.add("Squeeze", top, last, name="confidence")
        return nodes, {"raw": [1, "slots", VOCAB]}, ["token_ids", "confidence"]
    if form == "TopK":
        top, place = nodes.add_many("TopK", logits, one, name="best", outputs=["top", "place"], axis=-1)
        nodes.add("Squeeze", place, last, name="token_ids")
    else:
        nodes.add("ArgMax", logits, name="token_ids", axis=-1, keepdims=0)
        top = nodes.add("ReduceMax", logits, last, name="top", keepdims=1)
    if form == "ReduceLogSumExp":
        total = nodes.add("ReduceLogSumExp", logits, last, name="total", keepdims=1)
        nodes.add("Exp", nodes.add("Sub", top, total, name="gap"), name="confidence")
    else:
        shares = nodes.add("Exp", nodes.add("Sub", logits, top, name="shifted"), name="shares")
        nodes.add("Reciprocal", nodes.add("ReduceSum", shares, last, name="total"), name="confidence")
    return nodes, {"raw": [1, "slots", VOCAB]}, ["token_ids", "confidence"]


def measure(
    graphs: Mapping[str, Graph],
    feeds: Callable[[int], Mapping[str, np.ndarray]],
    slots: Sequence[int],
    args: argparse.Namespace,
) -> None:
    """The smallest of all rounds; the forms take turns."""
    clock = thread_time if args.threads == 1 else perf_counter
    for graph in graphs.values():
        graph.seconds.clear()
    for count in slots:
        fed = feeds(count)
        for _ in range(args.rounds):
            for graph in graphs.values():
                graph.run(count, fed, clock)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("products", "tail"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="also write JSON there")
    args = parser.parse_args(words)
    found = {"products": products, "tail": tail}[args.part](args)
    if args.json is not None:
        given = {"threads": args.threads, "rounds": args.rounds, "layers": args.layers}
        args.json.write_text(json.dumps(given | {"found": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
