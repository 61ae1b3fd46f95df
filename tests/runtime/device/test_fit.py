"""Which variant is taken where, why each other is not, and an engine that does not load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_cuda import FakeDevice, engine_info, engine_variant
from support.manifests import GOOD

from mars_export.runtime import SessionError
from mars_export.runtime.bundle.manifest import Bundle, Variant
from mars_export.runtime.device import trt_engine
from mars_export.runtime.device.trt_engine import LoadedEngine
from mars_export.runtime.device.variants import Here, choose, why_not

HERE = Here("linux-x86_64", {"tensorrt_rtx": "1.7.1.116"}, "sm86", "RTX 3090", "12.9")
GRAPH = GOOD.variants[0]


def engine(name: str = "rtx", **changes: Any) -> Variant:
    info = replace(engine_info(2, 4, 16), **changes)
    return replace(engine_variant(info, 64), name=name, file=f"{name}.engine", engine=info)


def bundle(*variants: Variant) -> Bundle:
    return Bundle(Path("b"), replace(GOOD, variants=variants))


def test_an_engine_is_taken_on_a_gpu_and_the_graph_on_a_cpu() -> None:
    held = bundle(GRAPH, engine("one", compute_capabilities=("sm89",)), engine("two"), engine("three"))
    assert choose(held, "cuda", HERE).name == "two"
    assert choose(held, "cpu").name == "model"
    assert choose(bundle(GRAPH), "cuda", HERE).name == "model"


@pytest.mark.parametrize(
    ("changes", "here", "why"),
    [
        ({}, {"tensorrt": {}}, r"tensorrt_rtx 1.7.1.116 is not installed; pip install 'mars-export\[rtx\]'"),
        (
            {},
            {"tensorrt": {"tensorrt_rtx": "1.6.0"}},
            "built with tensorrt_rtx 1.7.1.116, 1.6.0 is installed; build it again or install 1.7.1.116",
        ),
        (
            {},
            {"gpu": "sm75", "gpu_name": "RTX 2080"},
            r"built for sm86, sm89, this GPU is a RTX 2080 \(sm75\); build it with --target host",
        ),
        (
            {"cuda": "13"},
            {},
            "its libraries are for CUDA 13, this driver supports CUDA 12.9; update the driver",
        ),
        ({}, {"platform": "linux-aarch64"}, "built on linux-x86_64, this is linux-aarch64; build it here"),
        ({}, {"gpu": "", "no_gpu": "no NVIDIA GPU is visible"}, "no NVIDIA GPU is visible"),
        ({"cuda": "13"}, {"gpu": "sm75", "tensorrt": {}}, "is not installed.*built for sm86.*CUDA 13"),
    ],
)
def test_every_mismatch_names_both_sides(changes: dict[str, Any], here: dict[str, Any], why: str) -> None:
    held = bundle(GRAPH, engine(**changes))
    with pytest.raises(
        SessionError,
        match=f"(?s)no variant runs here on cuda:.*rtx: .*{why}.*model: a graph for ONNX Runtime; give"
        f" --variant model",
    ):
        choose(held, "cuda", replace(HERE, **here))


def test_an_engine_of_unknown_origin_is_not_opened() -> None:
    assert "does not say what it was built for" in str(why_not(replace(engine(), engine=None), "cuda", HERE))
    assert "does not say what it was built for" in str(
        why_not(replace(engine(), capacity=None), "cuda", HERE)
    )


class FakeTrt:
    """As much of the module as loading needs."""

    __version__ = "1.7.1.116"
    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="user")
    DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="eager")
    EngineInvalidityDiagnostics = SimpleNamespace(VERSION_MISMATCH=1, UNSUPPORTED_CC=2, MALFORMED_ENGINE=32)

    class ILogger:
        ERROR, INTERNAL_ERROR = 1, 0

    class IRuntimeCache:
        """What RTX has compiled."""

        def __init__(self) -> None:
            self.data = b""

        def deserialize(self, data: bytes) -> bool:
            self.data = data if data.startswith(b"kernels") else b""
            return bool(self.data)

        def serialize(self) -> bytes:
            return self.data

    def __init__(self, engine: Any, diagnostics: int = 0) -> None:
        runtime = SimpleNamespace(
            deserialize_cuda_engine=lambda data: engine,
            get_engine_validity=lambda data: ("INVALID", diagnostics),
        )
        self.Runtime = lambda logger: runtime


class FakeRawEngine:
    device_memory_size_v2 = 100

    def __init__(self) -> None:
        self.cache = FakeTrt.IRuntimeCache()
        self.contexts: list[dict[str, Any]] = []

    def create_runtime_config(self) -> Any:
        return SimpleNamespace(
            set_execution_context_allocation_strategy=lambda strategy: None,
            create_runtime_cache=lambda: self.cache,
            set_runtime_cache=lambda cache: None,
        )

    def create_execution_context(self, config: Any) -> Any:
        seen: dict[str, Any] = {"config": config}
        self.contexts.append(seen)
        return SimpleNamespace(
            set_device_memory=lambda address, size: seen.update(memory=(address, size)),
            set_optimization_profile_async=lambda index, stream: (
                seen.update(range=index) is None and index < 2
            ),
        )


def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: Any, diagnostics: int = 0) -> LoadedEngine:
    monkeypatch.setattr(trt_engine, "load", lambda backend: FakeTrt(raw, diagnostics))
    (tmp_path / "b").mkdir(exist_ok=True)
    (tmp_path / "b" / "rtx.engine").write_bytes(b"engine")
    return LoadedEngine.of(
        Bundle(tmp_path / "b", replace(GOOD, variants=(engine(),))), engine(), FakeDevice()
    )  # type: ignore[arg-type]


def test_kernels_are_kept_beside_the_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = FakeRawEngine()
    first = loaded(tmp_path, monkeypatch, raw)
    first.keep_kernels()
    assert [p.name for p in tmp_path.iterdir()] == ["b"], "nothing compiled, nothing written"
    raw.cache.data = b"kernels of two shapes"
    first.keep_kernels()
    (kept,) = (p for p in tmp_path.iterdir() if p.name != "b")
    assert kept.name.startswith(".b.rtx-")
    again = FakeRawEngine()
    second = loaded(tmp_path, monkeypatch, again)
    assert again.cache.data == b"kernels of two shapes"
    kept.unlink()
    second.keep_kernels()
    assert not kept.exists(), "unchanged, not written again"
    kept.write_bytes(b"of another world")
    loaded(tmp_path, monkeypatch, FakeRawEngine())


def test_contexts_share_scratch_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = FakeRawEngine()
    opened = loaded(tmp_path, monkeypatch, raw)
    opened.new_context(1, 4096, 7)
    assert (raw.contexts[0]["memory"], raw.contexts[0]["range"]) == ((4096, 100), 1)
    with pytest.raises(SessionError, match="no optimization profile 2; build it again"):
        opened.new_context(2, 4096, 7)


def test_an_engine_that_is_refused_names_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SessionError,
        match=r"rtx.engine: built with tensorrt_rtx 1.7.1.116 \(CUDA 12\) for sm86, sm89 on linux-x86_64 and"
        r" cannot be loaded here"
        r" \(tensorrt_rtx 1.7.1.116; .*\): version mismatch; malformed engine",
    ):
        loaded(tmp_path, monkeypatch, None, diagnostics=33)
