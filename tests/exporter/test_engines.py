"""Real engines, built by TensorRT-RTX without a GPU: parsed networks, validity, atomic bundles, recipes. What
they compute needs a GPU.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import onnx
import pytest
from support.agreement import PROMPTS, agrees, config
from support.fixtures import Named
from support.missing import need
from support.oracle import Oracle, generate
from support.shell import run

from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import ExportOptions, export_onnx
from mars_export.exporter.graph.fixed import fixed
from mars_export.exporter.tensorrt import build as tensorrt
from mars_export.exporter.tensorrt.engines import Outcome, add_engine, export_engine
from mars_export.exporter.tensorrt.plan import EngineOptions
from mars_export.runtime import ExportError, Session, SessionError
from mars_export.runtime.bundle.files import describe
from mars_export.runtime.bundle.open import open_bundle, write_manifest
from mars_export.runtime.device.ort import OrtBackend
from mars_export.runtime.device.trt_engine import collecting_logger
from mars_export.runtime.device.variants import why_not_exact

need("tensorrt_rtx", "rtx")
trt = import_module("tensorrt_rtx")
BLOCK, CAPACITY = 6, 128
SMALL = EngineOptions(target="sm86", fixed=True, capacity=CAPACITY)  # the quickest to build
FAMILIES = ("llama", "qwen2", "qwen3-mixed")
PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int4")
QUANTIZED = {"activations": "fp16", "group": 16, "embedding": "float", "head": "float"}


def graph_options(precision: str, **changes: Any) -> ExportOptions:
    # Drift is judged elsewhere: four bits are too few for random weights of 48 inputs.
    return ExportOptions(block=BLOCK, precision=precision, allow_drift=True, **QUANTIZED, **changes)


def export(
    checkpoint: Path, target: Path, precision: str, engine: EngineOptions = SMALL, **settings: Any
) -> Outcome:
    return export_engine(
        open_checkpoint(str(checkpoint)), target, graph_options(precision), engine, **settings
    )


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory, checkpoints: Named) -> Callable[[str, str, str], Path]:
    """Bundles with graphs only: family, precision, KV layout."""
    root = tmp_path_factory.mktemp("graphs")

    @cache
    def exported(family: str, precision: str, layout: str) -> Path:
        target = root / f"{family}-{precision}-{layout}"
        export_onnx(
            open_checkpoint(str(checkpoints(family))),
            target,
            replace(graph_options(precision), kv_layout=layout),
        )
        return target

    return exported


@pytest.fixture
def small(graphs: Callable[[str, str, str], Path], tmp_path: Path) -> Path:
    """A bundle of its own for each test, without an engine."""
    shutil.copytree(graphs("llama", "fp16", "static"), tmp_path / "b")
    return tmp_path / "b"


def contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.name != ".verified.json"}


@pytest.mark.parametrize("layout", ["static", "delta"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_parsed_network_is_the_graph(
    family: str, precision: str, layout: str, graphs: Callable[[str, str, str], Path], tmp_path: Path
) -> None:
    bundle = open_bundle(graphs(family, precision, layout))
    layers, variant = bundle.manifest.model.num_layers, bundle.manifest.variants[0]
    logger = collecting_logger(trt)
    builder = trt.Builder(logger)
    onnx.save(
        fixed(onnx.load(bundle.path / "model.onnx", load_external_data=False), {"capacity": CAPACITY}),
        tmp_path / "fixed.onnx",
    )
    shutil.copy(bundle.path / "weights.bin", tmp_path)
    network = tensorrt.parse(trt, logger, builder, tmp_path / "fixed.onnx")
    kinds = [network.get_layer(i).type for i in range(network.num_layers)]
    static = layout == "static"
    assert kinds.count(trt.LayerType.KV_CACHE_UPDATE) == (2 * layers if static else 0)
    masks = [a.mask is not None for a in tensorrt._attentions(trt, network, kinds)]
    assert masks == [True] * (layers if static else 0), (
        "TensorRT's parser drops nonpad_kv_seqlen: every mask is explicit"
    )
    inputs = {network.get_input(i).name: network.get_input(i) for i in range(network.num_inputs)}
    outputs = {network.get_output(i).name: network.get_output(i) for i in range(network.num_outputs)}
    names = [f"{i}.{kind}" for i in range(layers) for kind in ("key", "value")]
    assert set(inputs) == {"input_ids", "kv_length", "output_index", *(f"past_key_values.{n}" for n in names)}
    assert set(outputs) == {"token_ids", "confidence", *(f"present.{n}" for n in names)}
    kv = {"float32": trt.float32, "float16": trt.float16, "bfloat16": trt.bfloat16}[variant.kv_dtype]
    assert (
        {inputs[f"past_key_values.{n}"].dtype for n in names}
        == {outputs[f"present.{n}"].dtype for n in names}
        == {kv}
    )
    assert (inputs["input_ids"].dtype, outputs["token_ids"].dtype, outputs["confidence"].dtype) == (
        trt.int64,
        trt.int64,
        trt.float32,
    )
    model = bundle.manifest.model
    assert tuple(inputs["past_key_values.0.key"].shape) == (-1, model.num_kv_heads, CAPACITY, model.head_dim)


def test_a_symbolic_capacity_is_what_tensorrt_refuses(graphs: Callable[[str, str, str], Path]) -> None:
    """Why an engine has an ONNX file of its own: the day this fails, it needs none."""
    logger = collecting_logger(trt)
    with pytest.raises(ExportError, match="must have a static sequence length"):
        tensorrt.parse(trt, logger, trt.Builder(logger), graphs("llama", "fp16", "static") / "model.onnx")


@pytest.mark.parametrize(
    ("family", "precision", "layout", "dynamic"),
    [
        ("llama", "fp16", "static", True),
        ("qwen3-mixed", "bf16", "delta", True),
        ("qwen2", "fp32", "static", False),
        ("qwen2", "int4", "static", False),
        ("llama", "int8", "delta", False),
    ],
)
def test_engines_are_built_and_wellformed(
    family: str,
    precision: str,
    layout: str,
    dynamic: bool,
    graphs: Callable[[str, str, str], Path],
    tmp_path: Path,
) -> None:
    engine = replace(SMALL, kv_layout=layout, fixed=not dynamic, batch=2, prefill=32)
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
    assert (info.version, info.compute_capabilities) == (trt.__version__, ("sm86",))
    assert [r.name for r in info.ranges] == (["decode", "prefill"] if dynamic else ["decode"])
    assert info.graph_sha256 == describe(bundle.path / info.graph).sha256
    assert info.seconds > 0
    assert info.peak_memory > 10**7
    data = (bundle.path / variant.file).read_bytes()
    assert not tensorrt.is_malformed("tensorrt_rtx", data)
    assert tensorrt.is_malformed("tensorrt_rtx", b"\0" * 64 + data[64:]), "a damaged header"
    assert tensorrt.is_malformed("tensorrt_rtx", b"not an engine" * 100)
    counts = [done for phase, done, _ in seen if phase == "engine"]
    assert counts == sorted(counts)
    assert counts[-1] == tensorrt.PARTS


def test_the_graph_that_tensorrt_read_runs_in_onnxruntime_token_for_token(
    checkpoints: Named, oracles: Callable[[str], Oracle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mars_export.runtime.device.kv.bucket", lambda needed, present: CAPACITY)
    built = replace(SMALL, fixed=False, batch=4, prefill=32)
    export(checkpoints("qwen3-mixed"), tmp_path / "b", "fp32", built)
    bundle = open_bundle(tmp_path / "b")
    variant = bundle.manifest.variants[-1]
    assert variant.engine is not None
    backend = OrtBackend(
        bundle.path / variant.engine.graph, variant.outputs, bundle.manifest.model, "float32", threads=1
    )
    session = Session(bundle, variant, backend)
    for tau in (1.0, 0.6):
        answers = [generate(oracles("qwen3-mixed"), p, tau, max_new=24) for p in PROMPTS]
        for completion, answer in zip(session.generate_batch(PROMPTS, config(tau)), answers, strict=True):
            agrees(completion, answer)


def test_two_builds_have_equal_graphs_and_weights(checkpoints: Named, tmp_path: Path) -> None:
    for name in ("one", "two"):
        export(checkpoints("qwen2"), tmp_path / name, "fp16")
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert one.keys() == two.keys()
    assert {n for n in one if one[n] == two[n]} >= {
        n for n in one if n.endswith((".onnx", ".bin", "tokenizer.json"))
    }


def test_an_engine_is_added_in_place_or_to_a_copy(small: Path, tmp_path: Path) -> None:
    before = contents(small)
    add_engine(open_bundle(small), tmp_path / "copy", SMALL)
    assert contents(small) == before
    with pytest.raises(ExportError, match="copy exists; give --force"):
        add_engine(open_bundle(small), tmp_path / "copy", SMALL)
    add_engine(open_bundle(small), small, SMALL)
    after = contents(small)
    assert (
        set(after)
        == set(contents(tmp_path / "copy"))
        == set(before) | {"rtx-sm86-fixed.engine", "rtx-sm86-fixed.onnx"}
    )
    assert all(after[n] == before[n] for n in before if not n.startswith("manifest"))
    with pytest.raises(ExportError, match="has an engine `rtx-sm86-fixed` already; give --force"):
        add_engine(open_bundle(small), small, SMALL)
    add_engine(open_bundle(small), small, SMALL, force=True)
    assert [v.name for v in open_bundle(small, full=True).manifest.variants] == ["model", "rtx-sm86-fixed"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "copy"]


@pytest.mark.parametrize("how", ["signal", "error"])
def test_an_interrupted_build_leaves_the_bundle_as_it_was(how: str, small: Path, tmp_path: Path) -> None:
    before, told = contents(small), 0

    def interrupt(*_: object) -> None:
        nonlocal told
        told += 1
        if told == 5:
            if how == "error":
                raise MemoryError
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt if how == "signal" else MemoryError):
        add_engine(open_bundle(small), small, SMALL, progress=interrupt)
    assert contents(small) == before
    assert [p.name for p in tmp_path.iterdir()] == ["b"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_network_that_lost_something_is_not_built(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dropped:
        mask, decomposable = None, False

    monkeypatch.setattr(tensorrt, "_attentions", lambda trt, network, kinds: [Dropped()])
    with pytest.raises(
        ExportError,
        match=r"wrongly, so no engine was built: 1 attentions instead of 2; 1 attentions lost their mask",
    ):
        add_engine(open_bundle(small), small, SMALL)


def test_what_tensorrt_cannot_read_is_refused_before_it_is_asked(checkpoints: Named, tmp_path: Path) -> None:
    opened = open_checkpoint(str(checkpoints("llama")))
    with pytest.raises(ExportError, match="w8a8 is computed with integer operators for CPUs"):
        export_engine(opened, tmp_path / "b", ExportOptions(block=BLOCK, precision="w8a8"), SMALL)
    embedded = ExportOptions(block=BLOCK, precision="int8", group=16, allow_drift=True)
    with pytest.raises(ExportError, match="cannot look rows up in an int8 embedding"):
        export_engine(opened, tmp_path / "b", embedded, SMALL)
    export_onnx(opened, tmp_path / "int8", embedded)
    with pytest.raises(ExportError, match="cannot look rows up in an int8 embedding"):
        add_engine(open_bundle(tmp_path / "int8"), tmp_path / "int8", SMALL)


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"precision": "bf16"}, {}, "has no bfloat16 graph in the static KV layout.*it has: float16 static"),
        ({"precision": "fp8"}, {}, "--precision must be one of"),
        ({"block": 4}, {}, "is a bundle of block 6, not 4"),
        ({}, {"kv_layout": "delta"}, "has no graph in the delta KV layout.*mars-export trt CHECKPOINT"),
        ({}, {"target": "jetson-orin"}, "has no graph in the delta KV layout"),
    ],
)
def test_a_bundle_that_cannot_serve(
    settings: dict[str, Any], options: dict[str, Any], message: str, small: Path
) -> None:
    with pytest.raises(ExportError, match=message):
        add_engine(open_bundle(small), small, replace(SMALL, **options), **settings)


@pytest.mark.parametrize(
    ("family", "precision", "layout", "dynamic"),
    [("llama", "fp16", "static", True), ("qwen2", "fp32", "delta", False), ("qwen2", "int4", "static", True)],
)
def test_top_k_outputs_are_parsed_and_built(
    family: str, precision: str, layout: str, dynamic: bool, checkpoints: Named, tmp_path: Path
) -> None:
    engine = replace(SMALL, kv_layout=layout, fixed=not dynamic, batch=2, prefill=32)
    checkpoint = open_checkpoint(str(checkpoints(family)))
    options = replace(graph_options(precision), top_k=5, metrics=True, logits=True)
    export_engine(checkpoint, tmp_path / "b", options, engine)
    bundle = open_bundle(tmp_path / "b", full=True)
    graph, built = bundle.manifest.variants
    assert built.outputs == graph.outputs and {"topk_ids", "topk_logprobs"} <= set(built.outputs)
    assert built.engine is not None
    assert not tensorrt.is_malformed("tensorrt_rtx", (bundle.path / built.file).read_bytes())
    logger = collecting_logger(trt)
    network = tensorrt.parse(trt, logger, trt.Builder(logger), bundle.path / built.engine.graph)
    outputs = {network.get_output(i).name: network.get_output(i) for i in range(network.num_outputs)}
    assert tuple(outputs["topk_ids"].shape)[2:] == (5,) and outputs["topk_ids"].dtype == trt.int64
    assert tuple(outputs["topk_logprobs"].shape)[2:] == (5,) and outputs["topk_logprobs"].dtype == trt.float32


def test_another_machines_target_gets_a_recipe(checkpoints: Named, tmp_path: Path) -> None:
    done = run(
        "trt",
        checkpoints("llama"),
        "-o",
        tmp_path / "b",
        "--block",
        "6",
        "--target",
        "jetson-orin",
        "--jetpack",
        "6.2",
        "--top-k",
        "4",
    )
    assert done.returncode == 0, done.stderr
    assert "No engine was built: full TensorRT builds on the GPU it is for (sm87)" in done.stderr
    manifest = open_bundle(tmp_path / "b", full=True).manifest
    assert [(v.name, v.kv_layout) for v in manifest.variants] == [("model", "delta")]
    steps = {"build-on-device.sh", "tensorrt-jetson-orin.onnx", "tensorrt-jetson-orin.build.json"}
    assert steps <= {f.path for f in manifest.files}
    assert manifest.variants[0].outputs[-2:] == ("topk_ids", "topk_logprobs")
    Session.open(tmp_path / "b", threads=1).generate([1, 2], config(0.5))


def test_from_the_shell(small: Path) -> None:
    dry = run("trt", small, "--target", "sm86", "--fixed", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "dry run: nothing was built" in dry.stdout
    assert not list(small.glob("*.engine"))
    done = run("trt", small, "--target", "sm86", "--fixed", "--capacity", str(CAPACITY), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["built"] is True
    shown = run("inspect", small).stdout
    assert f"tensorrt_rtx {trt.__version__}" in shown
    assert "for sm86" in shown
    doctor = run("doctor", small)
    assert doctor.returncode == 0, doctor.stdout
    assert "variant rtx-sm86-fixed: no NVIDIA GPU" in doctor.stdout
    assert "none of this bundle's engines runs here" in doctor.stdout
    refused = run("generate", small, "-p", "x", "--device", "cuda")
    assert refused.returncode == 1
    assert "rtx-sm86-fixed: no NVIDIA GPU" in refused.stderr
    assert "give --variant model" in refused.stderr
    host = run("trt", small, "--target", "host")
    assert host.returncode == 1
    assert "give --target rtx" in host.stderr


def test_an_engine_of_before_is_renewed_for_exact_by_the_command_it_names(small: Path) -> None:
    ranged = replace(SMALL, fixed=False, batch=2, prefill=32)
    add_engine(open_bundle(small), small, ranged)
    bundle = open_bundle(small)
    variant = bundle.manifest.variants[-1]
    assert variant.engine is not None
    assert why_not_exact(bundle, variant) is None
    ranges = tuple(replace(r, outputs=replace(r.outputs, max=BLOCK)) for r in variant.engine.ranges)
    before = replace(variant, engine=replace(variant.engine, ranges=ranges))
    variants = (*bundle.manifest.variants[:-1], before)
    write_manifest(small, replace(bundle.manifest, variants=variants))
    words = str(why_not_exact(open_bundle(small), before))
    assert f"at most {BLOCK} predictions a step and exact needs {2 * BLOCK - 1}" in words
    command = shlex.split(words[words.index("mars-export trt") :].removesuffix(", or give tau"))
    done = run(*command[1:])
    assert done.returncode == 0, done.stderr
    renewed = open_bundle(small, full=True).manifest.variants[-1]
    assert renewed.engine is not None
    assert (renewed.name, renewed.engine.ranges) == (variant.name, variant.engine.ranges)


def test_a_session_on_the_cpu_takes_the_graph(
    graphs: Callable[[str, str, str], Path], tmp_path: Path
) -> None:
    add_engine(open_bundle(graphs("qwen2", "fp16", "static")), tmp_path / "b", SMALL)
    assert Session.open(tmp_path / "b", threads=1).variant.name == "model"
    with pytest.raises(
        SessionError,
        match="rtx-sm86-fixed does not run in this session: made for tensorrt_rtx: an engine runs on a GPU",
    ):
        Session.open(tmp_path / "b", variant="rtx-sm86-fixed")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "int4"])
def test_the_default_checkpoint(precision: str, tmp_path: Path) -> None:
    # Four bits of plain rounding are too few for this checkpoint's self-check; the engine is what is looked
    # at here.
    graph = ExportOptions(
        block=8,
        precision=precision,
        activations="fp16",
        embedding="float",
        head="float",
        allow_drift=precision == "int4",
        quantizer="round" if precision == "int4" else "auto",
    )
    variant = export_engine(open_checkpoint(None), tmp_path / "b", graph, EngineOptions()).variant
    assert variant is not None
    assert not tensorrt.is_malformed("tensorrt_rtx", (tmp_path / "b" / variant.file).read_bytes())
    open_bundle(tmp_path / "b", full=True)
