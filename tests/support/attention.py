"""A graph of one attention over int8 entries, and what it should be close to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from mars_export.exporter.graph import int8_kv as int8
from mars_export.exporter.graph.nodes import Nodes
from mars_export.exporter.graph.operators import DOMAIN
from mars_export.runtime.bundle.manifest import SCALE_BYTES
from mars_export.runtime.device.ort.library import open_session

OPSET, IR = 24, 11


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of an attention."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None


def write_graph(path: Path, sizes: Heads) -> Path:
    dims: Any = SimpleNamespace(
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        windows=[sizes.window],
        attention_scale=sizes.head_dim**-0.5,
    )
    nodes = Nodes()
    nodes.add("Identity", int8.attention(nodes, dims, 0, "q", "k", "v", OPSET), name="y")
    width, kinds = sizes.head_dim + SCALE_BYTES, ("key", "value")

    def info(name: str, kind: int, *shape: str | int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    def entries(prefix: str) -> list[onnx.ValueInfoProto]:
        return [info(f"{prefix}.0.{k}", TensorProto.INT8, "b", sizes.kv_heads, "c", width) for k in kinds]

    counts = {"q": sizes.heads, "k": sizes.kv_heads, "v": sizes.kv_heads}
    fed = [info(n, TensorProto.FLOAT, "b", count, "s", sizes.head_dim) for n, count in counts.items()]
    fed += [*entries("past_key_values"), info("kv_length", TensorProto.INT64, "b")]
    made = [info("y", TensorProto.FLOAT, "b", "s", sizes.heads * sizes.head_dim), *entries("present")]
    graph = helper.make_graph(nodes.nodes, "attention", fed, made, [*nodes.constants.values()])
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(
        graph, functions=[*nodes.functions.values()], opset_imports=opsets, ir_version=IR
    )
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


@dataclass(frozen=True)
class Step:
    """The inputs of an attention: q, k and v [b, heads, s, d], entries, and their number `kv_length` [b]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    key: np.ndarray
    value: np.ndarray
    kv_length: np.ndarray

    @classmethod
    def drawn(
        cls, draw: np.random.Generator, sizes: Heads, slots: int, capacity: int, kv_length: list[int]
    ) -> Step:
        """Random numbers; entries before `kv_length` have scales between 1/8 and 8."""
        rows, d = len(kv_length), sizes.head_dim
        q, k, v = (
            draw.normal(0, 1, (rows, heads, slots, d)).astype(np.float32)
            for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
        )
        shape = (rows, sizes.kv_heads, capacity, d + SCALE_BYTES)
        key, value = draw.integers(-127, 128, (2, *shape), np.int8)
        for entries in (key, value):
            entries[..., d] = draw.integers(-2, 5, shape[:3])
            entries[..., d + 1] = draw.integers(-64, 65, shape[:3])
        return cls(q, k, v, key, value, np.array(kv_length, np.int64))

    def slots(self, start: int, stop: int) -> Step:
        """Some of the slots."""
        q, k, v = (x[:, :, start:stop] for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, kv_length=self.kv_length + start)

    @property
    def feeds(self) -> dict[str, np.ndarray]:
        entries = {"past_key_values.0.key": self.key, "past_key_values.0.value": self.value}
        return {"q": self.q, "k": self.k, "v": self.v, **entries, "kv_length": self.kv_length}


def run(
    graph: Path, step: Step, operators: Path | None = None, threads: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The output [b, s, heads d], and the entries of keys and values."""
    session = open_session(
        onnxruntime, graph, ["CPUExecutionProvider"], {}, threads=threads, operators=operators
    )
    y, key, value = session.run(["y", "present.0.key", "present.0.value"], step.feeds)
    return np.asarray(y), np.asarray(key), np.asarray(value)


def float_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int, window: int | None
) -> np.ndarray:
    """Attention in fp64 of q [b, heads, s, d], at positions from `first` on, over k and v
    [b, kv_heads, entries, d]: [b, s, heads d].
    """
    groups, size = q.shape[1] // k.shape[1], q.shape[-1]
    keys, values = (np.repeat(x, groups, 1).astype(np.float64) for x in (k, v))
    distance = first + np.arange(q.shape[2])[:, None] - np.arange(k.shape[2])
    seen = (distance >= 0) & (distance < (window or distance.max() + 1))
    scores = np.where(seen, q @ keys.swapaxes(-1, -2) * size**-0.5, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = weights / weights.sum(-1, keepdims=True) @ values
    return mixed.swapaxes(1, 2).reshape(*mixed.swapaxes(1, 2).shape[:2], -1)
