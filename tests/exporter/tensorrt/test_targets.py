"""Targets, backends, JetPacks, shapes and memory: what is decided before TensorRT is asked. No TensorRT, no
GPU.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mars_export.exporter.export_options import EngineOptions
from mars_export.exporter.tensorrt import build as tensorrt
from mars_export.exporter.tensorrt import plan
from mars_export.exporter.tensorrt.build import parse
from mars_export.exporter.tensorrt.plan import TARGETS, layout_for, make_plan, recipe
from mars_export.runtime.bundle.manifest import ModelInfo
from mars_export.runtime.device.cuda import Gpu
from mars_export.runtime.errors import ExportError

MODEL = ModelInfo("llama", 288, 48, 2, 4, 2, 12, 4096)
ORIN = Gpu("Orin", "sm87", "12.6", is_integrated=True)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, "no NVIDIA GPU is visible")


def here(monkeypatch: pytest.MonkeyPatch, gpu: Gpu | str, installed: dict[str, str] | None = None) -> None:
    monkeypatch.setattr(plan, "find_gpu", lambda: gpu)
    monkeypatch.setattr(plan, "installed_version", lambda backend: (installed or {}).get(backend))


def plan_of(**options: Any) -> plan.EnginePlan:
    return make_plan(EngineOptions(**options), 8, 4096)


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_has_a_plan_without_a_gpu(name: str) -> None:
    result = plan_of(target=name)
    assert result.backend == ("tensorrt_rtx" if name.startswith(("rtx", "sm", "port")) else "tensorrt")
    assert (result.reason is None) == (result.backend == "tensorrt_rtx")


@pytest.mark.parametrize(
    ("options", "layout", "name"),
    [
        ({"target": "rtx"}, "in-place", "rtx"),
        ({"target": "sm86", "fixed": True}, "in-place", "rtx-sm86-fixed"),
        ({"target": "rtx", "kv_layout": "appended"}, "appended", "rtx"),
        ({"target": "portable"}, "in-place", "rtx-portable"),
        ({"target": "jetson-orin"}, "in-place", "tensorrt-jetson-orin"),
        ({"target": "jetson-thor", "kv_layout": "in-place"}, "in-place", "tensorrt-jetson-thor"),
        ({"target": "h200"}, "in-place", "tensorrt-h200"),
        ({"target": "h100", "kv_layout": "appended"}, "appended", "tensorrt-h100"),
    ],
)
def test_the_layout_is_what_the_targets_tensorrt_takes(
    options: dict[str, Any], layout: str, name: str
) -> None:
    result = plan_of(**options)
    assert (result.kv_layout, result.name) == (layout, name)


@pytest.mark.parametrize(
    ("flags", "asked"), [({"NetworkDefinitionCreationFlag": SimpleNamespace(STRONGLY_TYPED=1)}, 2), ({}, 0)]
)
def test_a_network_is_strongly_typed_by_a_flag_or_because_there_is_no_other_kind(
    flags: dict[str, Any], asked: int, tmp_path: Path
) -> None:
    """TensorRT 11 knows strong typing only."""
    given: list[int] = []
    builder = SimpleNamespace(create_network=lambda flag: given.append(flag) or "a network")
    parser = SimpleNamespace(parse_from_file=lambda path: path == str(tmp_path))
    trt = SimpleNamespace(OnnxParser=lambda network, logger: parser, **flags)
    assert parse(trt, None, builder, tmp_path) == "a network"
    assert given == [asked]


def test_in_place_writes_came_with_10_15() -> None:
    versions = ("10.3.0", "10.14", "10.15.1", "11.0")
    assert [layout_for(version) for version in versions] == ["appended", "appended", "in-place", "in-place"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"target": "pi5"},
            r"unknown target `pi5` \(known: host, rtx, portable, sm75, .*jetson-thor, h100, h200\)",
        ),
        ({"kv_layout": "cuda"}, "--kv-layout must be one of in-place, appended, not 'cuda'"),
        ({"workspace": 512}, "--workspace must be at least 1M, not 512"),
        ({"capacity": 15}, r"--capacity must be 16 to 4096"),
        (
            {"capacity": 1000, "batch": 2},
            "--capacity must be a multiple of 64 with --batch above 1, not 1000",
        ),
        (
            {"capacity": 5000, "prefill": 6000, "batch": 0},
            "--batch must be an integer of 1 to 1024, not 0.*--capacity must be.*--prefill must be 1 to",
        ),
        (
            {"target": "host"},
            "builds for the GPU of this machine, but no NVIDIA GPU is visible. To build without a GPU, give"
            " --target rtx",
        ),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        plan_of(**options)


def test_shapes() -> None:
    result = plan_of(batch=4, capacity=2048, prefill=256)
    decode, prefill = result.ranges
    assert (str(decode.batch), str(decode.slots), str(decode.outputs)) == (
        "1-4 (best 4)",
        "1-15 (best 8)",
        "1-15 (best 8)",
    )
    assert (str(prefill.batch), str(prefill.slots)) == ("1-4 (best 1)", "1-256 (best 256)")
    assert result.inputs(MODEL)[0]["past_key_values.1.value"] == (
        (1, 2, 2048, 12),
        (4, 2, 2048, 12),
        (4, 2, 2048, 12),
    )
    assert result.fixed_sizes == {"capacity": 2048}
    (only,) = plan_of(batch=4, fixed=True).ranges
    assert (str(only.batch), str(only.slots), str(only.outputs)) == ("4", "8", "8")
    assert plan_of(batch=4, fixed=True).fixed_sizes == {
        "capacity": 1024,
        "batch": 4,
        "slots": 8,
        "outputs": 8,
    }
    assert len(plan_of(prefill=15).ranges) == 1, "a full decode window covers it"
    assert str(prefill.outputs) == "1-15 (best 8)", (
        "exact mode asks for a block of draft tokens and its masks"
    )
    assert plan_of(capacity=1000).capacity == 1000
    assert make_plan(EngineOptions(batch=2), 4, 500).capacity == 448, "rows begin at multiples of 256 bytes"
    short = make_plan(EngineOptions(), 4, 64)
    assert (short.capacity, short.ranges[-1].slots.max) == (64, 64), "defaults fit a short context"


def test_the_host_is_what_its_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, ORIN, {"tensorrt": "10.3.0"})
    orin = plan_of(target="host")
    assert (orin.backend, orin.kv_layout, orin.name, orin.reason) == (
        "tensorrt",
        "appended",
        "tensorrt-sm87",
        None,
    )
    assert (plan_of(target="host").workspace, plan_of(target="sm86").workspace) == (1 << 30, None)
    assert plan_of(target="jetson-orin", workspace=5 << 20).workspace == 5 << 20
    assert plan_of(target="jetson-orin").reason is None
    with pytest.raises(ExportError, match="10.3.0 is older than 10.15 and cannot write KV entries in place"):
        plan_of(target="jetson-orin", kv_layout="in-place")
    assert "this machine has Orin (sm87)" in str(plan_of(target="h200").reason)
    desktop = Gpu("RTX 4090", "sm89", "12.9")
    here(monkeypatch, desktop, {"tensorrt_rtx": "1.7.0"})
    assert plan_of(target="host").name == "rtx-sm89"
    here(monkeypatch, desktop, {"tensorrt": "10.16.0"})
    assert (plan_of(target="host").name, plan_of(target="host").kv_layout) == ("tensorrt-sm89", "in-place")
    here(monkeypatch, Gpu("H200", "sm90", "13.0"), {"tensorrt_rtx": "1.7.0", "tensorrt": "10.16.0"})
    assert plan_of(target="host").backend == "tensorrt", "RTX does not know sm90"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "jetson-orin", "batch": 2}, "--batch 2 --capacity 1024 --prefill 128 --workspace 1024M"),
        ({"target": "jetson-thor", "kv_layout": "in-place"},
         "--kv-layout in-place --batch 1 --capacity 1024 --prefill 128 --workspace 1024M"),
        ({"target": "h200", "fixed": True, "tf32": True, "workspace": 512 << 20},
         "--kv-layout in-place --batch 1 --capacity 1024 --prefill 8 --fixed --tf32 --workspace 512M"),
    ],
)  # fmt: skip
def test_the_recipe_is_a_script_of_one_command(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    result = plan_of(**options)
    text = recipe(result)
    (tmp_path / "mars-export").write_text('#!/bin/sh\npwd\necho "$@"\n')
    (tmp_path / "mars-export").chmod(0o755)
    (tmp_path / "r.sh").write_text(text)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.check_output(["/bin/sh", tmp_path / "r.sh"], env=environment, text=True)
    assert done.splitlines() == [str(tmp_path), f"trt . --target host {words}"]
    assert result.reason is not None
    assert result.reason in text


@pytest.mark.parametrize(("tf32", "workspace"), [(False, None), (True, 512 << 20)])
def test_tf32_and_workspace_are_left_to_tensorrt_only_on_request(tf32: bool, workspace: int | None) -> None:
    """TensorRT's defaults: round to TF32, and take most of the GPU's memory."""
    result = plan_of(target="sm86", tf32=tf32, workspace=workspace)
    cleared: list[str] = []
    limits: list[tuple[str, int]] = []
    config = SimpleNamespace(
        clear_flag=cleared.append, set_flag=lambda _: None, num_compute_capabilities=0,
        set_compute_capability=lambda *_: True, add_optimization_profile=lambda _: None,
        set_memory_pool_limit=lambda pool, size: limits.append((pool, size)),
    )  # fmt: skip
    builder = SimpleNamespace(
        create_builder_config=lambda: config,
        create_optimization_profile=lambda: SimpleNamespace(set_shape=lambda *_: None),
    )
    flags = SimpleNamespace(TF32="TF32", REQUIRE_USER_ALLOCATION="")
    trt = SimpleNamespace(
        BuilderFlag=flags,
        ComputeCapability=SimpleNamespace(SM86=1),
        MemoryPoolType=SimpleNamespace(WORKSPACE="workspace"),
    )
    tensorrt._config(trt, builder, result, MODEL)
    assert cleared == ([] if tf32 else ["TF32"])
    assert limits == ([] if workspace is None else [("workspace", workspace)])


def test_a_recipe_can_be_asked_for_where_the_engine_could_be_built() -> None:
    assert plan_of(target="sm86").reason is None
    assert plan_of(target="sm86", build=False).reason == "--no-build was given"
    assert "full TensorRT builds on" in str(plan_of(target="h100", build=False).reason)


def test_too_little_memory_is_said_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt, "available", lambda: 2_000_000_000)
    tensorrt.require(400_000_000, force=False)
    with pytest.raises(
        ExportError,
        match=r"1.00 GB of weights takes about 3.6 GB of memory and 2.0 GB are available.*--force",
    ):
        tensorrt.require(1_000_000_000, force=False)
    tensorrt.require(1_000_000_000, force=True)
    monkeypatch.setattr(tensorrt, "available", lambda: None)
    tensorrt.require(10**12, force=False)
