"""Bundles that get an engine by TensorRT-RTX: in place or copied, whole whatever happens, refused where they
cannot serve; and the command that does it.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import onnx
import pytest
from support.agreement import config
from support.engines import CAPACITY, SMALL, contents, graph_options
from support.fixtures import Named
from support.missing import need
from support.shell import run, succeed

from mars_export import ExportError, Session
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.tensorrt import build as tensorrt
from mars_export.exporter.tensorrt import plan
from mars_export.exporter.tensorrt.engines import add_engine, export_engine
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.device.cuda import Gpu

need("tensorrt_rtx", "rtx")
trt = import_module("tensorrt_rtx")


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
    names = [v.name for v in open_bundle(small, full=True).manifest.variants]
    assert (names[0], names[-1]) == ("model", "rtx-sm86-fixed")
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


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"precision": "bf16"}, {},
         "has no bfloat16 graph in the in-place KV layout.*it has: float16 in-place"),
        ({"precision": "fp8"}, {}, "--precision must be one of"),
        ({"block": 4}, {}, "is a bundle of block 6, not 4"),
        ({}, {"kv_layout": "appended"}, "has no graph in the appended KV layout.*mars-export trt CHECKPOINT"),
        ({}, {"target": "jetson-orin"}, "has no graph in the appended KV layout"),
    ],
)  # fmt: skip
def test_a_bundle_that_cannot_serve(
    settings: dict[str, Any], options: dict[str, Any], message: str, small: Path
) -> None:
    with pytest.raises(ExportError, match=message):
        add_engine(open_bundle(small), small, replace(SMALL, **options), **settings)


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
        "--top-k",
        "4",
    )
    assert done.returncode == 0, done.stderr
    assert "No engine was built: full TensorRT builds only on the target GPU (sm87)" in done.stderr
    manifest = open_bundle(tmp_path / "b", full=True).manifest
    assert [(v.name, v.kv_layout) for v in manifest.variants] == [
        ("model", "in-place"),
        ("model-appended", "appended"),
    ]
    assert {"build-on-device.sh", "model.onnx", "model-appended.onnx"} <= {f.path for f in manifest.files}
    assert manifest.variants[0].outputs[2:] == ("topk_ids", "topk_logprobs", "logits")
    answers = [
        Session.open(tmp_path / "b", variant=v.name, threads=1).generate([1, 2], config(0.5)).token_ids
        for v in manifest.variants
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("version", "layout"), [("10.3.0", "appended"), ("10.16.2.10", "in-place")])
def test_the_tensorrt_of_a_jetson_chooses_the_graph_of_a_recipe(
    version: str, layout: str, checkpoints: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_checkpoint(str(checkpoints("llama")))
    export_engine(opened, tmp_path / "b", graph_options("fp16"), replace(SMALL, target="jetson-orin"))
    monkeypatch.setattr(plan, "find_gpu", lambda: Gpu("Orin", "sm87", "12.6", is_integrated=True))
    monkeypatch.setattr(plan, "installed_version", {"tensorrt": version}.get)
    monkeypatch.setattr(tensorrt, "load", lambda backend: None)
    read: list[str] = []

    def build(_: plan.EnginePlan, graph: Path, *__: object) -> tensorrt.Built:
        read.extend(n.op_type for n in onnx.load(graph, load_external_data=False).graph.node)
        return tensorrt.Built(b"engine", version, "12", 1.0, 1)

    monkeypatch.setattr(tensorrt, "build", build)
    result = add_engine(open_bundle(tmp_path / "b"), tmp_path / "b", replace(SMALL, target="host"))
    assert result.variant is not None
    assert (result.variant.name, result.variant.kv_layout) == ("tensorrt-sm87-fixed", layout)
    assert ("TensorScatter" in read) == (layout == "in-place")


def test_from_the_shell(small: Path) -> None:
    dry = succeed("trt", small, "--target", "sm86", "--fixed", "--dry-run")
    assert "dry run: nothing was built" in dry.stdout
    assert not list(small.glob("*.engine"))
    done = succeed("trt", small, "--target", "sm86", "--fixed", "--capacity", str(CAPACITY), "--json")
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
