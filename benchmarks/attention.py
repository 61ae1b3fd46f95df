"""Measures forms of attention over KV entries, each as a separate graph, in interleaved rounds:

    python benchmarks/attention.py [--lengths 512 2048 4096 7680] [--slots 1 8 64 256] [--threads 1]
                                   [--layers 8] [--rounds 12] [--json FILE]

`rows` and `heads` are what w8a8 graphs have below and from 128 slots on (exporter/graph/steady.py), and
`truths` is `rows` with a boolean mask that each layer must convert. `turned` is K q^T in plain operators with
keys in two halves, so that another thread can share the work; `pieces` also adds up values in pieces of 256.
The result is the smallest time of all rounds: CPU time with --threads 1, wall clock with more. Each layer has
separate entries, so that they come from memory; queries attend to all but the last few. Nine query heads of
64 share three key heads, as in SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forms import Graph, measure, session
from mars_export.exporter.graph.nodes import Nodes
from mars_export.exporter.graph.steady import UNSEEN

HEADS, KV_HEADS, DIM = 9, 3, 64
GROUP, HALVES, PIECE = HEADS // KV_HEADS, 2, 256
UNSEEN_END = 5  # entries behind the last query

Form = Callable[[Nodes, str, str, str], str]
"""q [1, heads, slots, dim] with keys and values [1, kv_heads, entries, dim] -> [1, heads, slots, dim]."""


def by_rows(mask: str) -> Form:
    def form(nodes: Nodes, q: str, key: str, value: str) -> str:
        rows = nodes.add("Reshape", q, "as_rows", name=f"{q}_rows")
        return as_heads(nodes, nodes.add("Attention", rows, key, value, mask, name=f"{q}_mixed"))

    return form


def by_heads(nodes: Nodes, q: str, key: str, value: str) -> str:
    return nodes.add("Attention", q, key, value, "mask", name=f"{q}_attended")


def turned(nodes: Nodes, q: str, key: str, value: str) -> str:
    mixed = nodes.add("MatMul", shares(nodes, q, key), value, name=f"{q}_mixed")
    return as_heads(nodes, mixed)


def pieces(nodes: Nodes, q: str, key: str, value: str) -> str:
    split = nodes.add(
        "Reshape",
        shares(nodes, q, key),
        nodes.constant("shares_by_piece", [0, 0, 0, -1, PIECE]),
        name=f"{q}_shares_split",
    )
    first = nodes.add("Transpose", split, name=f"{q}_pieces", perm=[0, 1, 3, 2, 4])
    values = nodes.add(
        "Reshape", value, nodes.constant("values_by_piece", [0, 0, -1, PIECE, DIM]), name=f"{q}_values"
    )
    parts = nodes.add("MatMul", first, values, name=f"{q}_parts")
    mixed = nodes.add("ReduceSum", parts, nodes.constant("axis_2", [2]), name=f"{q}_mixed", keepdims=0)
    return as_heads(nodes, mixed)


def shares(nodes: Nodes, q: str, key: str) -> str:
    """Of values, [1, kv_heads, rows, entries], by K q^T."""
    factor = nodes.constant("factor", DIM**-0.5, np.float32)
    rows = nodes.add(
        "Reshape",
        nodes.add("Mul", q, factor, name=f"{q}_scaled"),
        nodes.constant("as_halves", [0, KV_HEADS, 1, -1, DIM]),
        name=f"{q}_rows",
    )
    halves = nodes.add(
        "Reshape", key, nodes.constant("keys_by_half", [0, 0, HALVES, -1, DIM]), name=f"{q}_keys"
    )
    columns = nodes.add("Transpose", rows, name=f"{q}_columns", perm=[0, 1, 2, 4, 3])
    scores = nodes.add("MatMul", halves, columns, name=f"{q}_scores_by_half")
    whole = nodes.add("Reshape", scores, "scores_shape", name=f"{q}_scores_by_entry")
    scores = nodes.add("Transpose", whole, name=f"{q}_scores", perm=[0, 1, 3, 2])
    return nodes.add(
        "Softmax", nodes.add("Add", scores, "mask_of_rows", name=f"{q}_masked"), name=f"{q}_shares", axis=-1
    )


def as_heads(nodes: Nodes, mixed: str) -> str:
    shape = nodes.constant("as_heads", [0, HEADS, -1, DIM])
    return nodes.add("Reshape", mixed, shape, name=f"{mixed}_of_heads")


FORMS: dict[str, Form] = {
    "truths": by_rows("truths_of_rows"),
    "rows": by_rows("mask_of_rows"),
    "heads": by_heads,
    "turned": turned,
    "pieces": pieces,
}


def graph(form: Form, entries: int, layers: int, threads: int) -> Graph:
    """Layers one behind the other: each one's result is the next one's queries."""
    nodes = Nodes()
    nodes.constant("as_rows", [0, KV_HEADS, -1, DIM])
    nodes.constant("scores_shape", [1, KV_HEADS, entries, -1])
    repeats = nodes.constant("repeats", [1, 1, GROUP, 1])
    nodes.add("Tile", "mask", repeats, name="mask_of_rows")
    zero = nodes.constant("zero", 0, np.float32)
    nodes.add("GreaterOrEqual", "mask_of_rows", zero, name="truths_of_rows")
    q, cache = "q", [1, KV_HEADS, entries, DIM]
    shapes: dict[str, Sequence[Any]] = {"q": [1, HEADS, "slots", DIM], "mask": [1, 1, "slots", entries]}
    for i in range(layers):
        shapes |= {f"key_{i}": cache, f"value_{i}": cache}
        q = form(nodes, q, f"key_{i}", f"value_{i}")
    return session(nodes, shapes, [q], threads)


def measured(args: argparse.Namespace, entries: int) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    cache = {
        f"{kind}_{i}": draw.normal(0, 0.3, (1, KV_HEADS, entries, DIM)).astype(np.float32)
        for i in range(args.layers)
        for kind in ("key", "value")
    }
    queries = draw.normal(0, 1, (1, HEADS, max(args.slots), DIM)).astype(np.float32)

    def feeds(slots: int) -> dict[str, np.ndarray]:
        last = np.arange(entries - slots, entries)[:, None] - UNSEEN_END
        mask = np.where(np.arange(entries) <= last, 0, UNSEEN).astype(np.float32)
        return {"q": queries[:, :, :slots].copy(), "mask": mask[None, None], **cache}

    graphs = {name: graph(form, entries, args.layers, args.threads) for name, form in FORMS.items()}
    found: dict[str, Any] = {}
    differences = dict.fromkeys(FORMS, 0.0)
    for slots in args.slots:
        fed = feeds(slots)
        results = {name: each.session.run(None, fed)[0] for name, each in graphs.items()}
        for name, result in results.items():
            differences[name] = max(differences[name], float(np.abs(result - results["rows"]).max()))
    measure(graphs, feeds, args.slots, args)
    for name, each in graphs.items():
        times = {str(s): round(1000 * each.seconds[s] / args.layers, 4) for s in args.slots}
        shown = "  ".join(f"{slots}: {ms:.3f}" for slots, ms in times.items())
        print(f"{entries:6} {name:8} {shown}  differs by {differences[name]:.1e}", flush=True)
        found[name] = {"ms_a_layer": times, "differs_by": differences[name]}
    return found


def main(words: Sequence[str] | None = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--lengths", type=int, nargs="+", default=(512, 2048, 4096, 7680), metavar="N")
    parser.add_argument("--slots", type=int, nargs="+", default=(1, 8, 64, 256), metavar="N")
    for option, default in (("threads", 1), ("layers", 8), ("rounds", 12)):
        parser.add_argument(f"--{option}", type=int, default=default, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(words)
    if odd := [n for n in args.lengths if n % PIECE]:
        parser.error(f"lengths must be multiples of {PIECE}, not {', '.join(map(str, odd))}")
    print("ms a layer, by entries, form and slots")
    found = {str(entries): measured(args, entries) for entries in args.lengths}
    if args.json is not None:
        about = {"threads": args.threads, "rounds": args.rounds, "layers": args.layers, "found": found}
        args.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
