"""Measures the cost of a mixture of experts in standard operators, which is why Qwen3-MoE and others are
refused.

    # one layer of Qwen3-30B-A3B's kind, at a quarter of its weights
    python benchmarks/experts.py
    # does it run?
    python benchmarks/experts.py --experts 16 --hidden 64 --inner 32 --rounds 1

Three ways to write the layer, as multiples of a dense MLP of as many weights as one token's experts have:
`all`, every expert for every token, weighted; `gathered`, the chosen experts' weights, gathered for each
token; `branches`, one `If` for each expert, taken where any token chose it. Weights are fp32, routing is
random, the best of some rounds counts. Experts used are counted; times depend on the machine.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

Graph = onnx.ModelProto
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def model(nodes: list[onnx.NodeProto], inputs: dict[str, int], weights: dict[str, np.ndarray]) -> Graph:
    graph = helper.make_graph(
        nodes,
        "experts",
        [helper.make_tensor_value_info(name, kind, None) for name, kind in inputs.items()],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def mlp(x: str, up: str, down: str, y: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("MatMul", [x, up], [f"{y}_inner"]),
        helper.make_node("Sigmoid", [f"{y}_inner"], [f"{y}_active"]),
        helper.make_node("MatMul", [f"{y}_active", down], [y]),
    ]


def every(weights: dict[str, np.ndarray]) -> Graph:
    """x [1, s, hidden] through all experts, share [experts, s, 1]."""
    nodes = mlp("x", "up", "down", "each")
    nodes += [
        helper.make_node("Mul", ["each", "share"], ["weighted"]),
        helper.make_node("ReduceSum", ["weighted", "axis"], ["y"]),
    ]
    return model(nodes, {"x": FLOAT, "share": FLOAT}, weights | {"axis": np.array([0])})


def gathered(weights: dict[str, np.ndarray]) -> Graph:
    """chosen [s, k], x [s, 1, 1, hidden], kept [s, k, 1, 1]."""
    nodes = [helper.make_node("Gather", [name, "chosen"], [f"{name}_own"]) for name in ("up", "down")]
    nodes += mlp("x", "up_own", "down_own", "each")
    nodes += [
        helper.make_node("Mul", ["each", "kept"], ["weighted"]),
        helper.make_node("ReduceSum", ["weighted", "axis"], ["y"]),
    ]
    inputs = {"x": FLOAT, "chosen": INT64, "kept": FLOAT}
    return model(nodes, inputs, weights | {"axis": np.array([1])})


def branches(weights: dict[str, np.ndarray]) -> Graph:
    """x [s, hidden], used [experts], share [experts, s, 1]."""
    nodes, parts = [], []
    flat = {}
    for i, (up, down) in enumerate(zip(weights["up"], weights["down"], strict=True)):
        flat |= {f"up{i}": up, f"down{i}": down, f"i{i}": np.array(i)}
        output = helper.make_tensor_value_info(f"part{i}", FLOAT, None)
        then = [
            *mlp("x", f"up{i}", f"down{i}", f"each{i}"),
            helper.make_node("Gather", ["share", f"i{i}"], [f"own{i}"]),
            helper.make_node("Mul", [f"each{i}", f"own{i}"], [f"part{i}"]),
        ]
        skip = [helper.make_node("Identity", ["nothing"], [f"part{i}"])]
        nodes += [
            helper.make_node("Gather", ["used", f"i{i}"], [f"used{i}"]),
            helper.make_node(
                "If",
                [f"used{i}"],
                [f"out{i}"],
                then_branch=helper.make_graph(then, "then", [], [output]),
                else_branch=helper.make_graph(skip, "else", [], [output]),
            ),
        ]
        parts.append(f"out{i}")
    nodes.append(helper.make_node("Sum", parts, ["y"]))
    inputs = {"x": FLOAT, "used": BOOL, "share": FLOAT}
    return model(nodes, inputs, flat | {"nothing": np.zeros((1, 1), np.float32)})


def dense(weights: dict[str, np.ndarray], chosen: int) -> Graph:
    up = np.concatenate(list(weights["up"][:chosen]), -1)
    down = np.concatenate(list(weights["down"][:chosen]), 0)
    return model(mlp("x", "up", "down", "y"), {"x": FLOAT}, {"up": up, "down": down})


def seconds(graph: Graph, feeds: dict[str, np.ndarray], rounds: int) -> float:
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    session.run(None, feeds)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        session.run(None, feeds)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--chosen", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=384)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8, 15])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    random = np.random.default_rng(0)
    sizes = {"up": (args.experts, args.hidden, args.inner), "down": (args.experts, args.inner, args.hidden)}
    weights = {name: random.standard_normal(size, np.float32) for name, size in sizes.items()}
    print("| slots | experts used | dense, ms | all | gathered | branches |")
    print("|---|---|---|---|---|---|")
    for slots in args.slots:
        x = random.standard_normal((slots, args.hidden), np.float32)
        chosen = np.stack([random.permutation(args.experts)[: args.chosen] for _ in range(slots)])
        share = np.zeros((args.experts, slots, 1), np.float32)
        share[chosen, np.arange(slots)[:, None]] = 1 / args.chosen
        kept = np.full((slots, args.chosen, 1, 1), 1 / args.chosen, np.float32)
        used = np.isin(np.arange(args.experts), chosen)
        feeds = {
            "dense": (dense(weights, args.chosen), {"x": x}),
            "all": (every(weights), {"x": x[None], "share": share}),
            "gathered": (gathered(weights), {"x": x[:, None, None], "chosen": chosen, "kept": kept}),
            "branches": (branches(weights), {"x": x, "used": used, "share": share}),
        }
        times = {name: seconds(graph, fed, args.rounds) for name, (graph, fed) in feeds.items()}
        cells = [f"{1000 * times['dense']:.1f}"]
        cells += [f"{times[name] / times['dense']:.1f} x" for name in ("all", "gathered", "branches")]
        print(f"| {slots} | {int(used.sum())} of {args.experts} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
