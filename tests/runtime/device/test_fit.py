"""Which variant is taken where, why each other is not, and an engine that does not load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_engine import MODEL, engine_info, engine_variant
from support.manifests import GOOD

from mars_export import SessionError
from mars_export.runtime.bundle.manifest import Variant
from mars_export.runtime.bundle.open import Bundle
from mars_export.runtime.device.trt import engine as trt_engine
from mars_export.runtime.device.trt.engine import LoadedEngine
from mars_export.runtime.device.variants import Host, choose, why_not

HERE = Host("linux-x86_64", {"tensorrt_rtx": "1.7.1.116"}, "sm86", "RTX 3090", "12.9")
GRAPH = GOOD.variants[0]
Load = Callable[..., LoadedEngine]


def engine(name: str = "rtx", **changes: Any) -> Variant:
    info = replace(engine_info(2, 4, 16), **changes)
    return replace(engine_variant(info, 64), name=name, file=f"{name}.engine", engine=info)


def bundle(*variants: Variant) -> Bundle:
    return Bundle(Path("b"), replace(GOOD, variants=variants))


def test_an_engine_is_taken_on_a_gpu_and_the_graph_on_a_cpu() -> None:
    held = bundle(GRAPH, engine("one", compute_capabilities=("sm89",)), engine("two"), engine("three"))
    assert choose(held, "cuda", HERE).name == "two"
    assert choose(held, "cpu").name == "model"
    portable = bundle(GRAPH, engine("one", compute_capabilities=("portable",)))
    assert choose(portable, "cuda", replace(HERE, gpu="sm90")).name == "one", (
        "TensorRT-RTX decides when it loads"
    )
    assert choose(bundle(GRAPH), "cuda", HERE).name == "model"


@pytest.mark.parametrize(
    ("changes", "here", "why"),
    [
        (
            {"version": "10.16.1.11"},
            {"tensorrt": {"tensorrt_rtx": "11.4.1.20"}},
            "10.16.1.11, 11.4.1.20 is installed; build it again or install 10.16.1.11",
        ),
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


def test_int8_entries_are_for_cpus() -> None:
    graph = replace(GRAPH, precision="w8a8", kv_dtype="int8")
    assert why_not(graph, "cpu", HERE) is None
    assert "for CPUs; export with --kv float" in str(why_not(graph, "cuda", HERE))


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
    """The engine of `engine()` over the tiny model; `changes`: tensors that are something else, None for not
    there.
    """

    device_memory_size_v2 = 100

    def __init__(self, **changes: Any) -> None:
        names = [f"{i}.{kind}" for i in range(MODEL.num_layers) for kind in ("key", "value")]
        self.tensors: dict[str, Any] = dict.fromkeys(
            ("input_ids", "kv_length", "output_index"), ("INPUT", "INT64", ())
        )
        self.tensors |= {"token_ids": ("OUTPUT", "INT64", ()), "confidence": ("OUTPUT", "FLOAT", ())}
        kv = (-1, MODEL.num_kv_heads, 64, MODEL.head_dim)
        self.tensors |= {f"past_key_values.{n}": ("INPUT", "FLOAT", kv) for n in names}
        self.tensors |= {f"present.{n}": ("OUTPUT", "FLOAT", kv) for n in names}
        self.tensors = {n: v for n, v in (self.tensors | changes).items() if v is not None}
        self.not_in_place: set[str] = set()
        self.cache = FakeTrt.IRuntimeCache()
        self.contexts: list[FakeRawContext] = []

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> Any:
        return SimpleNamespace(name=self.tensors[name][0])

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=self.tensors[name][1])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name][2]  # type: ignore[no-any-return]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return None if name in self.not_in_place else name.replace("present", "past_key_values")

    def create_runtime_config(self) -> Any:
        return SimpleNamespace(
            set_execution_context_allocation_strategy=lambda strategy: None,
            create_runtime_cache=lambda: self.cache,
            set_runtime_cache=lambda cache: None,
        )

    def create_execution_context(self, config: Any) -> Any:
        self.contexts.append(FakeRawContext(config))
        return self.contexts[-1]


class FakeRawContext:
    """An execution context of TensorRT: what it is given, and what it would not take."""

    def __init__(self, config: Any) -> None:
        self.config, self.shapes = config, 0
        self.memory: tuple[int, int] | None = None
        self.range: int | None = None
        self.is_capturable = True

    def set_device_memory(self, address: int, size: int) -> None:
        assert address % 256 == 0
        assert size >= FakeRawEngine.device_memory_size_v2
        self.memory = (address, size)

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        assert type(stream) is int
        assert not self.shapes, "it would drop the shapes that were set"
        self.range = index
        return index < 2

    def is_stream_capturable(self, stream: int) -> bool:
        assert type(stream) is int
        return self.is_capturable


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads an engine from `tmp_path / "b"`."""

    def loaded(raw: Any, diagnostics: int = 0, **changes: Any) -> LoadedEngine:
        variant = replace(engine(), **changes)
        monkeypatch.setattr(trt_engine, "find", lambda backend: FakeTrt(raw, diagnostics))
        (tmp_path / "b").mkdir(exist_ok=True)
        (tmp_path / "b" / "rtx.engine").write_bytes(b"engine")
        held = Bundle(tmp_path / "b", replace(GOOD, model=MODEL, variants=(variant,)))
        return LoadedEngine.load(held, variant)

    return loaded


def test_kernels_are_kept_beside_the_bundle(tmp_path: Path, load: Load) -> None:
    raw = FakeRawEngine()
    first = load(raw)
    first.keep_kernels()
    assert [p.name for p in tmp_path.iterdir()] == ["b"], "nothing compiled, nothing written"
    raw.cache.data = b"kernels of two shapes"
    first.keep_kernels()
    (kept,) = (p for p in tmp_path.iterdir() if p.name != "b")
    assert kept.name.startswith(".b.rtx-")
    again = FakeRawEngine()
    second = load(again)
    assert again.cache.data == b"kernels of two shapes"
    kept.unlink()
    second.keep_kernels()
    assert not kept.exists(), "unchanged, not written again"
    kept.write_bytes(b"of another world")
    load(FakeRawEngine())


def test_contexts_share_scratch_memory(load: Load) -> None:
    raw = FakeRawEngine()
    opened = load(raw)
    context = opened.new_context(1, 4096, 7)
    assert (raw.contexts[0].memory, raw.contexts[0].range) == ((4096, 100), 1)
    assert opened.is_capturable(context, 7)
    context.is_capturable = False
    assert not opened.is_capturable(context, 7)
    assert opened.is_capturable(SimpleNamespace(), 7), "an older TensorRT is not asked, but tried"
    with pytest.raises(SessionError, match="no optimization profile 2; build it again"):
        opened.new_context(2, 4096, 7)


def test_an_engine_that_is_refused_names_both_sides(load: Load) -> None:
    with pytest.raises(
        SessionError,
        match=r"rtx.engine: built with tensorrt_rtx 1.7.1.116 \(CUDA 12\) for sm86, sm89 on linux-x86_64 and"
        r" cannot be loaded here"
        r" \(tensorrt_rtx 1.7.1.116; .*\): version mismatch; malformed engine",
    ):
        load(None, diagnostics=33)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"margin": ("OUTPUT", "FLOAT", ())}, "margin"),
        ({"confidence": None}, "confidence"),
        ({"confidence": ("OUTPUT", "HALF", ())}, "confidence"),
        ({"input_ids": ("INPUT", "INT32", ())}, "input_ids"),
        ({"past_key_values.1.value": ("INPUT", "FLOAT", (-1, 2, 128, 4))}, "past_key_values.1.value"),
        ({"present.0.key": ("INPUT", "FLOAT", (-1, 2, 64, 4))}, "present.0.key"),
    ],
)
def test_an_engine_whose_tensors_are_others_is_refused(
    changes: dict[str, Any], name: str, load: Load
) -> None:
    with pytest.raises(
        SessionError, match=f"the engine and the manifest disagree about {name}; build the engine again"
    ):
        load(FakeRawEngine(**changes))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, None),
        ({"topk_ids": ("OUTPUT", "FLOAT", (-1, -1, 5))}, "topk_ids"),
        ({"topk_logprobs": None}, "topk_logprobs"),
        ({"topk_logprobs": ("OUTPUT", "FLOAT", (-1, -1, 6))}, "topk_logprobs"),
        ({"topk_ids": ("OUTPUT", "INT64", (-1, -1))}, "topk_ids, topk_logprobs"),
        (dict.fromkeys(("topk_ids", "topk_logprobs"), 5000), "topk_ids, topk_logprobs"),
        (dict.fromkeys(("topk_ids", "topk_logprobs"), -1), "topk_ids, topk_logprobs"),
        ({"logits": ("OUTPUT", "FLOAT", (-1, -1, 9))}, "logits"),
    ],
)
def test_the_widths_of_an_engines_outputs(changes: dict[str, Any], names: str | None, load: Load) -> None:
    kinds = {"topk_ids": "INT64", "topk_logprobs": "FLOAT", "logits": "FLOAT"}
    wide = {n: ("OUTPUT", kind, (-1, -1, 5)) for n, kind in kinds.items()}
    wide["logits"] = ("OUTPUT", "FLOAT", (-1, -1, MODEL.vocab_size))
    wide |= {n: ("OUTPUT", kinds[n], (-1, -1, v)) if isinstance(v, int) else v for n, v in changes.items()}
    outputs = ("token_ids", "confidence", *kinds)
    if names is None:
        opened = load(FakeRawEngine(**wide), outputs=outputs)
        assert (opened.width("topk_ids"), opened.width("logits")) == (5, MODEL.vocab_size)
        return
    with pytest.raises(SessionError, match=f"the engine and the manifest disagree about {names}; build"):
        load(FakeRawEngine(**wide), outputs=outputs)


def test_an_engine_that_does_not_write_in_place_is_refused(load: Load) -> None:
    raw = FakeRawEngine()
    raw.not_in_place = {"present.1.key"}
    with pytest.raises(SessionError, match="disagree about present.1.key"):
        load(raw)


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt_engine, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    (tmp_path / "b").mkdir()
    with pytest.raises(
        SessionError,
        match=r"tensorrt_rtx is not installed here; pip install"
        r" 'mars-export\[rtx\]'",
    ):
        LoadedEngine.load(Bundle(tmp_path / "b", GOOD), engine())
    assert trt_engine.installed_version("tensorrt") is None
    assert "JetPack" in trt_engine.missing("tensorrt")


@pytest.mark.parametrize(
    ("installed", "is_good"),
    [("1.7.1.116", True), ("1.7.1", True), ("1.7.1.117", False), ("1.7", True), ("1.70.1", False)],
)
def test_versions_agree_in_what_both_say(installed: str, is_good: bool) -> None:
    here = replace(HERE, tensorrt={"tensorrt_rtx": installed})
    assert (why_not(engine(), "cuda", here) is None) is is_good
