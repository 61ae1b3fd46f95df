"""Real engines, built by TensorRT-RTX without a GPU: well-formed, of the graph that was read, the same twice.
What they compute needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.agreement import follow
from support.engines import CAPACITY, SMALL, graph_options
from support.fixtures import Named
from support.missing import need
from support.oracle import Oracle

from mars_export import Session
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export_options import EngineOptions
from mars_export.exporter.tensorrt import build as tensorrt
from mars_export.exporter.tensorrt.engines import EngineResult, add_engine, export_engine
from mars_export.runtime.bundle.files import describe
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.device.ort.backend import OrtBackend
from mars_export.runtime.device.trt.engine import collecting_logger
from mars_export.runtime.errors import MarsWarning

need("tensorrt_rtx", "rtx")
trt = import_module("tensorrt_rtx")


def is_malformed(data: bytes) -> bool:
    """By TensorRT's check without a GPU."""
    _, diagnostics = trt.Runtime(collecting_logger(trt)).get_engine_validity(data)
    return bool(int(diagnostics) & int(trt.EngineInvalidityDiagnostics.MALFORMED_ENGINE))


def export(
    checkpoint: Path, target: Path, precision: str, engine: EngineOptions = SMALL, **settings: Any
) -> EngineResult:
    return export_engine(
        open_checkpoint(str(checkpoint)), target, graph_options(precision), engine, **settings
    )


@pytest.mark.parametrize(
    ("family", "precision", "layout", "dynamic", "gpus"),
    [
        ("llama", "fp16", "in-place", True, "portable"),
        ("qwen3-mixed", "bf16", "appended", True, "sm86"),
        ("qwen2", "int4", "in-place", False, "sm86"),
    ],
)
def test_engines_are_built_and_wellformed(
    family: str,
    precision: str,
    layout: str,
    dynamic: bool,
    gpus: str,
    graphs: Callable[[str, str, str], Path],
    tmp_path: Path,
) -> None:
    engine = replace(SMALL, target=gpus, kv_layout=layout, fixed=not dynamic, batch=2, prefill=32)
    seen: list[tuple[str, int, int]] = []
    outcome = add_engine(
        open_bundle(graphs(family, precision, layout)),
        tmp_path / "b",
        engine,
        progress=lambda *told: seen.append(told),
    )
    bundle = open_bundle(tmp_path / "b", full=True)
    assert outcome.manifest == bundle.manifest
    variant = bundle.manifest.variants[-1]
    info = variant.engine
    assert info is not None
    assert (variant.backend, variant.kv_layout, variant.capacity, variant.is_fixed) == (
        "tensorrt_rtx",
        layout,
        CAPACITY,
        not dynamic,
    )
    assert (info.version, info.compute_capabilities) == (trt.__version__, (gpus,))
    assert [r.name for r in info.ranges] == (["decode", "prefill"] if dynamic else ["decode"])
    assert info.graph_sha256 == describe(bundle.path / info.graph).sha256
    assert info.seconds > 0
    assert info.peak_memory > 10**7
    data = (bundle.path / variant.file).read_bytes()
    assert not is_malformed(data)
    assert is_malformed(b"\0" * 64 + data[64:]), "a damaged header"
    assert is_malformed(b"not an engine" * 100)
    counts = [done for phase, done, _ in seen if phase == "engine"]
    assert counts == sorted(counts)
    assert counts[-1] == tensorrt.PARTS


def test_attention_without_a_fused_kernel_is_decomposed(
    graphs: Callable[[str, str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no such kernel for fp32, which is taken for half precision here."""
    build = tensorrt.build
    monkeypatch.setattr(
        tensorrt, "build", lambda plan, file, model, is_fp32, report: build(plan, file, model, False, report)
    )
    with pytest.warns(MarsWarning, match="no fused kernel for this attention.*slower"):
        outcome = add_engine(open_bundle(graphs("llama", "fp32", "in-place")), tmp_path / "b", SMALL)
    assert outcome.variant is not None
    assert not is_malformed((tmp_path / "b" / outcome.variant.file).read_bytes())


def test_the_graph_that_tensorrt_read_runs_in_onnxruntime_token_for_token(
    checkpoints: Named, oracles: Callable[[str], Oracle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mars_export.runtime.device.kv.bucket", lambda needed, present: CAPACITY)
    built = replace(SMALL, fixed=False, batch=4, prefill=32)
    export(checkpoints("qwen3-mixed"), tmp_path / "b", "fp32", built)
    bundle = open_bundle(tmp_path / "b")
    variant = bundle.manifest.variants[-1]
    assert variant.engine is not None
    backend = OrtBackend(bundle, replace(variant, kv_dtype="float32", file=variant.engine.graph), threads=1)
    session = Session(bundle, variant, backend, None)
    for tau in (1.0, 0.6):
        follow(session, oracles("qwen3-mixed"), tau)


def test_top_k_outputs_are_parsed_and_built(checkpoints: Named, tmp_path: Path) -> None:
    engine = replace(SMALL, kv_layout="in-place", fixed=False, batch=2, prefill=32)
    checkpoint = open_checkpoint(str(checkpoints("llama")))
    options = replace(graph_options("fp16"), top_k=5, metrics=True, logits=True)
    export_engine(checkpoint, tmp_path / "b", options, engine)
    bundle = open_bundle(tmp_path / "b", full=True)
    graph, built = bundle.manifest.variants
    assert built.outputs == graph.outputs and {"topk_ids", "topk_logprobs"} <= set(built.outputs)
    assert built.engine is not None
    assert not is_malformed((bundle.path / built.file).read_bytes())
    logger = collecting_logger(trt)
    network = tensorrt.parse(trt, logger, trt.Builder(logger), bundle.path / built.engine.graph)
    outputs = {network.get_output(i).name: network.get_output(i) for i in range(network.num_outputs)}
    assert tuple(outputs["topk_ids"].shape)[2:] == (5,) and outputs["topk_ids"].dtype == trt.int64
    assert tuple(outputs["topk_logprobs"].shape)[2:] == (5,) and outputs["topk_logprobs"].dtype == trt.float32
