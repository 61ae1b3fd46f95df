"""Attention of w8a8 graphs: the same bits however many slots a step has, on either side of `WIDE_SLOTS`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper
from support import tiny
from support.fixtures import Exported, Named
from support.graphs import forward

from mars_export import Session
from mars_export.exporter.checkpoint.dims import Dims
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.graph import attention
from mars_export.exporter.graph.attention import WIDE_SLOTS
from mars_export.exporter.graph.nodes import Nodes
from mars_export.runtime.decode.backend import StepInput

TOKENS = [(37 * i) % 250 for i in range(3 * WIDE_SLOTS + 9)]
EDGES = (1, 2, WIDE_SLOTS - 1, WIDE_SLOTS, WIDE_SLOTS + 1, len(TOKENS))
# Heads of 32: angles have the same bits in a step of any size too (runtime/device/ort/backend.py).
KINDS = {
    "shared": tiny.WIDE,
    "own": tiny.OWN,
    "sliding": tiny.Tiny("sliding", "mistral", {**tiny.WIDE.settings, "sliding_window": 70}),
}


@pytest.fixture(scope="module")
def opened(exported: Exported) -> Callable[[str], Session]:
    def session(kind: str) -> Session:
        bundle = exported(KINDS[kind], precision="w8a8", logits=True, metrics=True)
        return Session.open(bundle, threads=1, cache_bytes=0)

    return cache(session)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", EDGES)
def test_a_prompt_in_pieces_of_any_width_has_the_same_bits(kind: str, slots: int, opened: Any) -> None:
    session = opened(kind)
    whole = forward(session, TOKENS, tuple(range(2, len(TOKENS), 2)))
    pieces = forward(session, TOKENS, tuple(range(slots, len(TOKENS), slots)))
    for index in (0, 1, 4):  # tokens, confidences, logits
        np.testing.assert_array_equal(whole[index], pieces[index])


@pytest.mark.parametrize("capacity", [640, 896, 1024])
def test_the_capacity_changes_no_bit(capacity: int, opened: Callable[[str], Session]) -> None:
    session = opened("shared")
    found = {}
    for entries in (512, capacity):
        cache = session.backend.new_cache(1)
        cache.reserve(entries)
        for start, stop in ((0, WIDE_SLOTS + 3), (WIDE_SLOTS + 3, len(TOKENS) - 1), (len(TOKENS) - 1, None)):
            ids = np.array([TOKENS[start:stop]])
            index = np.array([[ids.shape[1] - 1]])
            last = session.backend.step(cache, 0, StepInput(ids, np.array([start]), index), True)
        found[entries] = last.logits
    np.testing.assert_array_equal(found[512], found[capacity])


def run(dims: Dims, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, ...]:
    """One attention by itself: its result, and the query rows that its products had."""
    nodes = Nodes()
    attention.write_rows(nodes, dims)
    rows = attention.rows_of(nodes, dims, "mask")
    mixed = attention.batch_invariant_attention(nodes, dims, "q", "k", "v", rows)
    plans = {"input_ids": np.zeros(q.shape[::2], np.int64), "q": q, "k": k, "v": v, "mask": mask}
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), [None] * value.ndim)
        for name, value in plans.items()
    ]
    results = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in (mixed, "query_rows", rows)
    ]
    graph = helper.make_graph(nodes.nodes, "attention", infos, results, [*nodes.constants.values()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    used = {info.name for info in session.get_inputs()}
    made: tuple[np.ndarray, ...] = tuple(session.run(None, {n: a for n, a in plans.items() if n in used}))
    return made


@pytest.mark.parametrize("slots", [1, 5, WIDE_SLOTS - 1, WIDE_SLOTS, 2 * WIDE_SLOTS])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2-mha"])
def test_it_is_attention_by_rows_or_by_heads(name: str, slots: int, checkpoints: Named) -> None:
    """Beside numpy; what no query sees is no part of its result, even where it is large."""
    dims = open_checkpoint(str(checkpoints(name))).dims
    heads, kv_heads, d = dims.num_heads, dims.num_kv_heads, dims.head_dim
    draw = np.random.default_rng(slots)
    length = slots + 7
    q, k, v = (
        draw.normal(0, 2, (2, count, rows, d)).astype(np.float32)
        for count, rows in ((heads, slots), (kv_heads, length), (kv_heads, length))
    )
    k[:, :, -1], v[:, :, -1] = 1e18, 1e18  # behind every cursor
    start = np.array([6, 2])
    mask = np.arange(length) <= (start[:, None] + np.arange(slots))[:, None, :, None]
    mixed, rows, added = run(dims, q, k, v, mask)
    groups = heads // kv_heads
    keys, values = (np.repeat(x, groups, axis=1).astype(np.float64) for x in (k, v))
    scores = np.where(mask, q.astype(np.float64) @ keys.swapaxes(2, 3) * d**-0.5, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    exact = (shares / shares.sum(-1, keepdims=True)) @ values
    np.testing.assert_allclose(mixed, exact, atol=1e-5)
    if groups == 1:
        assert rows.shape == (2, heads, slots + 1, d)
    elif slots < WIDE_SLOTS:
        assert rows.shape == (2, kv_heads, groups * slots, d)
    else:
        assert rows.shape == (2, heads, slots, d)
    assert added.shape == (2, 1, rows.shape[2], length) and added.dtype == np.float32
