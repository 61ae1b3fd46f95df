"""The step graph: its contract, and its numbers against transformers and numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support import tiny
from support.exports import export
from support.fixtures import Exported, Named
from support.graphs import KEPT, TOKENS, forward, raw, shape_of
from support.oracle import Oracle

from mars_export import Session
from mars_export.exporter.export_options import ExportOptions
from mars_export.runtime.bundle.manifest import FORMAT_VERSION
from mars_export.runtime.bundle.open import open_bundle


@pytest.mark.parametrize("name", tiny.TINIES)
def test_logits_are_those_of_transformers(
    name: str, sessions: Callable[[str], Session], oracles: Callable[[str], Oracle]
) -> None:
    expected = oracles(name).logits(TOKENS).numpy()
    assert 3 < expected.std() < 30, "weights large enough to mean something"
    for cuts in ((), (1,), (3, 17, 18, 40)):
        found = forward(sessions(name), TOKENS, cuts)[-1]
        assert np.abs(found - expected)[:, KEPT].max() < 1e-4
        assert found[:, tiny.MASK].max() < -1e8


@pytest.mark.parametrize("name", ["a2d-qwen2", "llama"])
def test_token_ids_and_metrics_are_those_of_numpy(name: str, sessions: Callable[[str], Session]) -> None:
    token_ids, confidence, margin, entropy, logits = forward(sessions(name), TOKENS, (20,))
    exact = logits[:, KEPT].astype(np.float64)
    probabilities = np.exp(exact - exact.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    ordered = np.sort(probabilities, -1)
    assert (token_ids == logits.argmax(-1)).all()
    np.testing.assert_allclose(confidence, ordered[:, -1], atol=1e-6)
    np.testing.assert_allclose(margin, ordered[:, -1] - ordered[:, -2], atol=1e-6)
    np.testing.assert_allclose(entropy, -(probabilities * np.log(probabilities)).sum(-1), atol=1e-5)


def test_fp16_is_the_type_of_entries_and_not_of_predictions(exported: Exported) -> None:
    """Its bounds are checked in every family (checkpoint/test_families.py)."""
    path = exported("llama", precision="fp16", metrics=True) / "model.onnx"
    graph = onnx.load(path, load_external_data=False).graph
    kinds = {i.name: i.type.tensor_type.elem_type for i in [*graph.input, *graph.output]}
    assert kinds["past_key_values.0.key"] == kinds["present.1.value"] == onnx.TensorProto.FLOAT16
    assert kinds["confidence"] == kinds["entropy"] == kinds["logits"] == onnx.TensorProto.FLOAT


@pytest.mark.parametrize("layout", ["in-place", "appended"])
def test_fixed_graphs_give_what_the_dynamic_one_gives(
    layout: str, checkpoints: Named, tmp_path: Path
) -> None:
    options = ExportOptions(block=4, fixed=True, batch=2, capacity=48, prefill=10, kv_layout=layout)
    export(checkpoints("qwen3"), tmp_path / "b", options)
    manifest = open_bundle(tmp_path / "b").manifest
    fixed_variants = [v for v in manifest.variants if v.is_fixed]
    assert [v.slots for v in fixed_variants] == [1, 4, 10]
    random, model = np.random.default_rng(0), manifest.model
    for variant in fixed_variants:
        assert (variant.batch, variant.capacity, variant.weights) == (2, 48, "weights.bin")
        slots = variant.slots or 0
        plans: dict[str, Any] = {
            "input_ids": random.integers(0, 250, (2, slots)),
            "kv_length": np.array([5, 31]),
            "output_index": np.tile(np.arange(slots), (2, 1)),
        }
        shape = (2, model.num_kv_heads, 48, model.head_dim)
        names = [f"past_key_values.{suffix}" for suffix in model.kv_suffixes]
        plans |= {name: random.normal(size=shape).astype(np.float32) for name in names}
        dynamic, fixed = (raw(tmp_path / "b" / file, plans) for file in ("model.onnx", variant.file))
        assert dynamic.keys() == fixed.keys()
        for name in dynamic:
            np.testing.assert_allclose(fixed[name], dynamic[name], atol=1e-4, err_msg=name)
        graph = onnx.load(tmp_path / "b" / variant.file, load_external_data=False).graph
        for info in [*graph.input, *graph.output]:
            assert all(d.HasField("dim_value") for d in info.type.tensor_type.shape.dim), info.name
        arithmetic = {n.name for n in graph.node if n.op_type in ("Shape", "Range")}
        assert arithmetic == {"output_shape"}


def test_the_contract_of_names_dtypes_and_shapes(bundles: Named) -> None:
    model = onnx.load(bundles("llama") / "model.onnx", load_external_data=False)
    int64, float32 = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT
    layers = [f"{i}.{kind}" for i in range(2) for kind in ("key", "value")]
    cache = (float32, ["batch", 2, "capacity", 12])
    assert {i.name: shape_of(i) for i in model.graph.input} == {
        "input_ids": (int64, ["batch", "slots"]),
        "kv_length": (int64, ["batch"]),
        "output_index": (int64, ["batch", "outputs"]),
        **{f"past_key_values.{layer}": cache for layer in layers},
    }
    assert {o.name: shape_of(o) for o in model.graph.output} == {
        "token_ids": (int64, ["batch", "outputs"]),
        **{name: (float32, ["batch", "outputs"]) for name in ("confidence", "margin", "entropy")},
        "logits": (float32, ["batch", "outputs", tiny.VOCAB_SIZE]),
        **{f"present.{layer}": cache for layer in layers},
    }


@pytest.mark.parametrize("logits", [True, False])
def test_outputs_by_default(checkpoints: Named, tmp_path: Path, logits: bool) -> None:
    options = ExportOptions(block=4) if logits else ExportOptions(block=4, logits=False)
    export(checkpoints("llama"), tmp_path / "b", options)
    names = [o.name for o in onnx.load(tmp_path / "b" / "model.onnx", load_external_data=False).graph.output]
    predictions = [name for name in names if not name.startswith("present.")]
    assert predictions == ["token_ids", "confidence", *(["logits"] if logits else [])]


@pytest.mark.parametrize("name", tiny.TINIES)
def test_every_graph_is_clean_and_every_attention_has_its_own_mask(name: str, bundles: Named) -> None:
    path = bundles(name) / "model.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(path, load_external_data=False)
    attentions = [node for node in model.graph.node if node.op_type == "Attention"]
    assert len(attentions) == open_bundle(bundles(name)).manifest.model.num_layers
    for node in attentions:
        assert len(node.input) == 4
        assert node.input[3], "TensorRT drops nonpad_kv_seqlen: the mask is explicit"
        assert "is_causal" not in [a.name for a in node.attribute]
    assert {node.domain for node in model.graph.node} == {""}, "standard operators only"
    assert len({node.name for node in model.graph.node}) == len(model.graph.node)


def test_the_model_says_what_it_is(bundles: Named) -> None:
    model = onnx.load(bundles("llama") / "model.onnx", load_external_data=False)
    assert model.producer_name == "mars-export"
    assert model.producer_version
    assert {p.key: p.value for p in model.metadata_props} == {
        "mars.format_version": FORMAT_VERSION,
        "mars.block": "6",
        "mars.kv_layout": "in-place",
        "mars.precision": "float32",
    }
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 24)]


def test_weights_lie_aligned_in_one_file(bundles: Named) -> None:
    model = onnx.load(bundles("qwen2-mha") / "model.onnx", load_external_data=False)
    external = [{e.key: e.value for e in t.external_data} for t in model.graph.initializer if t.external_data]
    assert {entry["location"] for entry in external} == {"weights.bin"}
    assert all(int(entry["offset"]) % 64 == 0 for entry in external)
    inside = sum(len(t.raw_data) for t in model.graph.initializer if not t.external_data)
    assert inside < 10_000, "nothing large inside the graph file"


def test_two_exports_have_equal_bytes(bundles: Named, checkpoints: Named, tmp_path: Path) -> None:
    export(checkpoints("llama-bias"), tmp_path / "again", block=6, metrics=True, logits=True)
    names = sorted(p.name for p in (tmp_path / "again").iterdir())
    graphs = {"fp32-cuda.onnx", "model.onnx"}
    assert {*names} == {"manifest.json", "manifest.sha256", "tokenizer.json", "weights.bin"} | graphs
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (bundles("llama-bias") / name).read_bytes(), name
