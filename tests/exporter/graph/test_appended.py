"""The `appended` KV layout and bfloat16: graphs for TensorRT that ONNX Runtime can judge."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from support import tiny
from support.agreement import follow
from support.exports import export
from support.fixtures import Exported, Named
from support.graphs import KEPT, TOKENS, forward, raw, shape_of
from support.oracle import Oracle

from mars_export import Session, SessionError
from mars_export.exporter.check import segments
from mars_export.exporter.check.selfcheck import BOUNDS
from mars_export.runtime.bundle.open import open_bundle


@pytest.fixture(scope="module")
def appended_bundles(exported: Exported) -> Named:
    return lambda name: exported(name, metrics=True, logits=True, kv_layout="appended")


@pytest.fixture(scope="module")
def appended_sessions(appended_bundles: Named) -> Callable[[str], Session]:
    return cache(lambda name: Session.open(appended_bundles(name), threads=1))


@pytest.mark.parametrize("name", tiny.TINIES)
def test_every_family(
    name: str, appended_sessions: Callable[[str], Session], oracles: Callable[[str], Oracle]
) -> None:
    follow(appended_sessions(name), oracles(name), 0.6)
    expected = oracles(name).logits(TOKENS).numpy()
    assert (
        np.abs(forward(appended_sessions(name), TOKENS, (3, 17, 18, 40))[-1] - expected)[:, KEPT].max() < 1e-4
    )


@pytest.mark.parametrize("cache_block", [1, 8])
def test_prompts_and_answers_over_chunks_and_buckets(
    cache_block: int,
    appended_sessions: Callable[[str], Session],
    oracles: Callable[[str], Oracle],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mars_export.runtime.decode.limits.PREFILL_CHUNK", 7)
    monkeypatch.setattr("mars_export.runtime.decode.backend.GROWTH", 8)
    prompts = [list(range(40, 40 + length)) for length in (6, 7, 15, 50)]
    follow(appended_sessions("mistral"), oracles("mistral"), 0.6, cache_block=cache_block, prompts=prompts)


def test_the_contract(appended_bundles: Named) -> None:
    path = appended_bundles("llama") / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    assert {p.key: p.value for p in model.metadata_props}["mars.kv_layout"] == "appended"
    float32 = onnx.TensorProto.FLOAT
    shapes = {v.name: shape_of(v) for v in [*model.graph.input, *model.graph.output]}
    assert shapes["past_key_values.1.value"] == (float32, ["batch", 2, "capacity", 12])
    assert shapes["present.1.value"] == (float32, ["batch", 2, "slots", 12])
    assert open_bundle(appended_bundles("llama")).manifest.variants[0].kv_layout == "appended"


@pytest.mark.parametrize("layout", ["in-place", "appended"])
def test_bf16_is_judged_here_and_runs_elsewhere(
    layout: str, checkpoints: Named, oracles: Callable[[str], Oracle], tmp_path: Path
) -> None:
    manifest = export(
        checkpoints("qwen3"), tmp_path / "b", block=4, precision="bf16", logits=True, kv_layout=layout
    )
    drift, (logit, confidence, share) = manifest.variants[0].drift, BOUNDS["bfloat16"]
    assert drift is not None
    size = float(np.abs(oracles("qwen3").logits(TOKENS).numpy()).max())
    assert 0.1 < drift.max_logit_error <= logit * size, "coarser than fp16"
    assert drift.max_confidence_error <= confidence
    assert drift.argmax_matches >= share * drift.positions
    model = onnx.load(tmp_path / "b" / "model.onnx", load_external_data=False)
    kinds = {i.name: i.type.tensor_type.elem_type for i in [*model.graph.input, *model.graph.output]}
    assert kinds["past_key_values.0.key"] == kinds["present.1.value"] == onnx.TensorProto.BFLOAT16
    with pytest.raises(SessionError, match="no bfloat16 kernels; this graph is for TensorRT"):
        Session.open(tmp_path / "b", threads=1)


def test_emulation_rounds_every_result(checkpoints: Named, tmp_path: Path) -> None:
    export(checkpoints("llama"), tmp_path / "b", block=4, precision="bf16")
    wide = segments.widened(onnx.load(tmp_path / "b" / "model.onnx", load_external_data=False))
    watched = ["layers.0.qkv", "layers.0.attention", "layers.1.mlp_residual"]
    wide.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in watched
    )
    onnx.save(wide, tmp_path / "b" / "wide.onnx")
    cache_shape = (1, 2, 8, 12)
    plans: dict[str, Any] = {
        "input_ids": np.array([[5, 6]]),
        "kv_length": np.array([0]),
        "output_index": np.array([[1]]),
    }
    plans |= {
        f"past_key_values.{i}.{kind}": np.zeros(cache_shape, np.float32)
        for i in range(2)
        for kind in ("key", "value")
    }
    found = raw(tmp_path / "b" / "wide.onnx", plans)
    for name in [*watched, "present.1.key"]:
        assert (found[name] == found[name].astype(ml_dtypes.bfloat16).astype(np.float32)).all(), name
        assert np.abs(found[name]).max() > 0
