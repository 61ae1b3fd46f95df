"""The ONNX Runtime backend: a step bound by address, KV in place, on a CPU or a GPU. Only this file imports
it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import headroom
from ..bundle.held import Watched
from ..bundle.manifest import ModelInfo, Variant
from ..bundle.open import Bundle
from ..decode.backend import StepOutput, bucket
from ..errors import DeviceLost, SessionError
from .binding import Binding, StepInput
from .cuda_libraries import load_libraries
from .kv import KvRows
from .lost import ADVICE, is_lasting
from .memory import HostMemory, Memory
from .name import DeviceName
from .ort_graphs import Graphs, run_options
from .ort_kept import KeptMemory, doubled
from .ort_loading import advice, first_line, load, on_cpu
from .ort_memory import OrtMemory
from .ort_options import parted
from .ort_signature import KvLayout, check_signature
from .ort_worker import THE_WORKER, OnWorker
from .scratch import Scratch, require_session

if TYPE_CHECKING:
    from ..decode.backend import Cache

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
KV_DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16)}
INT64, FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
ORT_TYPES = {"float32": "tensor(float)", "float16": "tensor(float16)"}
# Read when the library is loaded. Since 1.31 it tells its makers what it runs, from threads of its own that
# take memory when they like, and the process with them where they get none.
NO_TELEMETRY = ("ORT_DISABLE_TELEMETRY", "1")
EXTRAS = {"cpu": "cpu", "cuda": "gpu"}
# Memory of a GPU is asked for as it is needed, not in powers of two: what is left is for KV rows.
SETTINGS = {"cpu": {}, "cuda": {"arena_extend_strategy": "kSameAsRequested"}}
# Of products with int4 and int8 weights: 0 and 1 compute in fp32, 2 in fp16, 3 in bf16, 4 with activations in
# 8-bit blocks.
ACCURACY_LEVELS = (0, 1, 2, 3, 4)
FASTEST_LEVEL = 4
LEVELED = ("int4", "int8")
# Their products on a CPU add up in one order whatever the step's size, but one slot alone takes another way.
# Blocks of int4 and int8 and half precision have kernels by size.
FIRM = ("float32", "w8a8")
# Angles are computed many at a time, and what is left over in another way: nothing may be left over.
FIRM_ANGLES = 16
GPU_ADVICE = (
    "check the GPU with nvidia-smi and the CUDA libraries with `mars-export doctor`, or give --device cpu"
)
NO_KERNELS = (
    "ONNX Runtime has no bfloat16 kernels; this graph is for TensorRT (`mars-export trt`), or export with"
    " --precision fp16 or fp32"
)


class OrtBackend:
    """A step graph in an ONNX Runtime session.

    `outputs` are the prediction outputs it must have; KV tensors follow `model`. `memory` None: that of
    `device`. `place` is where `graph` is opened, by its own name if None. `block` is the bundle's: steps of
    few sizes are captured where the provider's option `enable_cuda_graph` asks for it.
    """

    def __init__(
        self,
        graph: Path,
        outputs: tuple[str, ...],
        model: ModelInfo,
        kv_dtype: str,
        device: str = "cpu",
        threads: int | None = None,
        accuracy_level: int = FASTEST_LEVEL,
        kv_layout: str = "static",
        memory: Memory | None = None,
        place: Path | None = None,
        settings: Mapping[str, str] | None = None,
        block: int = 1,
    ) -> None:
        name = DeviceName.of(device)
        device = name.kind
        ort = _import(device)
        entries, own = parted(settings or {}, name)
        self._scratch: Scratch | None = None
        self._watched = Watched(None, ())
        self.outputs = outputs
        self.max_capacity = model.context_length
        self.max_slots: int | None = None
        self.max_outputs: int | None = None
        self.firm_slots: int | None = None
        self._cache_shape = (model.num_kv_heads, model.head_dim)
        self._dtype = KV_DTYPES[kv_dtype]
        self._in_place = kv_layout == "static"
        self._suffixes = [f"{i}.{kind}" for i in range(model.num_layers) for kind in ("key", "value")]
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(accuracy_level))
        options.add_session_config_entry("session.record_ep_graph_assignment_info", str(int(device != "cpu")))
        if threads is not None:
            options.intra_op_num_threads = threads
        options.enable_cpu_mem_arena = self._has_arena = device != "cpu" or not headroom.is_limited()
        try:
            for key, value in entries.items():
                options.add_session_config_entry(key, value)
            own = SETTINGS[device] | own
            obstacle = None if self._in_place else f"a step of the {kv_layout} layout is more than one run"
            self._session, captures, self._refusal = load(
                ort, place or graph, options, PROVIDERS[device], own, THE_WORKER, obstacle
            )
        except Exception as error:  # onnxruntime raises its own classes, and plain RuntimeError
            why = first_line(error).replace(str((place or graph).parent), str(graph.parent))
            then = "" if device == "cpu" else f"; {GPU_ADVICE}"
            raise SessionError(f"{graph}: ONNX Runtime cannot load the graph: {why}{then}") from error
        if PROVIDERS[device] not in self._session.get_providers():
            raise SessionError(
                f"{graph}: ONNX Runtime could not start {PROVIDERS[device]} and would compute on the CPU;"
                f" {GPU_ADVICE}"
            )
        layout = KvLayout(self._suffixes, self._cache_shape, ORT_TYPES[kv_dtype], self._in_place)
        self._widths = check_signature(self._session, graph, self.outputs, layout, model.vocab_size)
        number = int(own.get("device_id", 0))
        self._graphs: Graphs | None = None
        if captures:
            self._graphs = Graphs(block, kv_dtype, partial(run_options, ort))
            memory = memory or OnWorker(KeptMemory(ort, device, PROVIDERS[device], number), THE_WORKER)
        elif memory is None:
            memory = HostMemory() if device == "cpu" else OrtMemory(ort, device, PROVIDERS[device], number)
        self._find_places(memory)
        if self._graphs and not self._graphs.reason:
            THE_WORKER.run(partial(self._try_graphs, self._graphs))
        self.on_cpu = on_cpu(self._session, PROVIDERS[device]) if device != "cpu" else {}
        """Operator -> how many nodes of the graph a GPU session computes on the CPU."""

    @classmethod
    def of(
        cls,
        bundle: Bundle,
        variant: Variant,
        device: str,
        threads: int | None,
        accuracy_level: int | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> OrtBackend:
        """Load a dynamic ONNX variant of a bundle; `accuracy_level` None is the one its drift was measured
        at. `settings` are ONNX Runtime's own, as `parted` reads them.
        """
        if accuracy_level is not None and variant.precision not in LEVELED:
            raise SessionError(
                f"variant {variant.name} is {variant.precision}: an accuracy level is for"
                f" {' and '.join(LEVELED)} weights"
            )
        level = accuracy_level if accuracy_level is not None else variant.accuracy_level
        level = FASTEST_LEVEL if level is None else level
        if level not in ACCURACY_LEVELS:
            raise SessionError(
                f"accuracy level must be one of {', '.join(map(str, ACCURACY_LEVELS))}, not {level}"
            )
        graph, model = bundle.path / variant.file, bundle.manifest.model
        sizes = {entry.path: entry.size for entry in bundle.manifest.files}
        weights = sizes.get(variant.weights or variant.file, 0)
        if device == "cpu":
            require_session(model, weights, variant.precision, threads, loaded="onnxruntime" in sys.modules)
        backend = cls(
            graph, variant.outputs, model, variant.kv_dtype, device, threads, level, variant.kv_layout,
            place=bundle.place(variant.file), settings=settings, block=bundle.manifest.block,
        )  # fmt: skip
        if device == "cpu" and variant.weights is not None:
            backend._watched = Watched(bundle.held, [variant.weights])  # ONNX Runtime has it mapped
        if device == "cpu":
            backend._scratch = Scratch.of(model, variant, weights, arena=backend._has_arena)
        if device == "cpu" and variant.precision in FIRM and model.head_dim % (2 * FIRM_ANGLES) == 0:
            backend.firm_slots = 2
        return backend

    @property
    def num_graphs(self) -> int:
        """Steps that are replayed as CUDA graphs."""
        return self._graphs.count if self._graphs else 0

    @property
    def why_no_graphs(self) -> str | None:
        """Why steps are not captured, or no longer, although that was asked for."""
        return self._graphs.reason if self._graphs else self._refusal

    def new_cache(self, num_rows: int) -> KvRows:
        grown = doubled if self._graphs else bucket
        return KvRows(self._memory, len(self._suffixes), num_rows, *self._cache_shape, self._dtype, grown)

    def step(
        self,
        cache: Cache,
        first: int,
        input_ids: np.ndarray,
        kv_length: np.ndarray,
        output_index: np.ndarray,
        want_logits: bool,
    ) -> StepOutput:
        assert isinstance(cache, KvRows)
        given = StepInput(input_ids, kv_length, output_index)
        if self._graphs is None:
            return self._step(cache, first, given, want_logits)
        return THE_WORKER.run(partial(self._step, cache, first, given, want_logits))

    def _step(self, cache: KvRows, first: int, given: StepInput, want_logits: bool) -> StepOutput:
        self._watched.check()
        try:
            if self._graphs and not (want_logits or self._graphs.reason):
                captured = self._captured(self._graphs, cache, first, given)
                if captured is not None:
                    return captured
            return self._plainly(cache, first, given, want_logits)
        except BaseException as error:
            cache.unbind()  # it may be half made, or name memory that goes with this frame
            if not isinstance(error, Exception) or isinstance(error, SessionError):
                raise
            # onnxruntime raises its own classes, and plain RuntimeError
            rows, slots = given.input_ids.shape
            what = f"ONNX Runtime failed in a step of {rows} x {slots} slots: {first_line(error)}"
            if is_lasting(str(error)):
                raise DeviceLost(what + ADVICE) from error
            raise SessionError(what + advice(error)) from error

    def _plainly(self, cache: KvRows, first: int, given: StepInput, want_logits: bool) -> StepOutput:
        scratch, (rows, slots) = self._scratch, given.input_ids.shape
        if scratch is None:
            return self._run(cache, first, given, want_logits)
        with scratch.step(rows, slots, cache.capacity, given.output_index.shape[1]):
            return self._run(cache, first, given, want_logits)

    def _run(self, cache: KvRows, first: int, given: StepInput, want_logits: bool) -> StepOutput:
        rows, slots = given.input_ids.shape
        binding = self._binding(cache, first, rows, want_logits)
        results = self._ready(binding, given, want_logits)
        plain = self._graphs.plain if self._graphs else None
        if self._in_place:
            binding.run(plain)
        else:
            shape = (rows, self._cache_shape[0], slots, self._cache_shape[1])
            new = [binding.expect(f"present.{s}", shape, self._dtype) for s in self._suffixes]
            binding.run(plain)
            cache.place(first, given.kv_length, new)
        if want_logits and "logits" in results:
            results["logits"] = binding.take("logits")
        return StepOutput(**{n: value if n == "logits" else value.read() for n, value in results.items()})

    def _ready(self, binding: Binding, given: StepInput, want_logits: bool) -> dict[str, Any]:
        """A step's inputs written, and memory for its results, by name."""
        for name, value in given._asdict().items():
            binding.write(name, value)
        predictions = given.output_index.shape
        results: dict[str, Any] = {}
        for name in self.outputs:
            if name == "token_ids":
                results[name] = binding.expect(name, predictions, INT64)
            elif name not in self._widths:
                results[name] = binding.expect(name, predictions, FLOAT32)
            elif name != "logits" or want_logits:
                shape = (*predictions, *self._widths[name])
                results[name] = binding.expect(name, shape, INT64 if name == "topk_ids" else FLOAT32)
        return results

    def _captured(self, graphs: Graphs, cache: KvRows, first: int, given: StepInput) -> StepOutput | None:
        """The step, filled up, as one launch; None where it is to run as it is."""
        filled = graphs.fill(given)
        if filled is None:
            return None
        slots, count = filled.input_ids.shape[1], filled.output_index.shape[1]
        cache.reserve(int(filled.kv_length.max()) + slots)
        rows = len(filled.kv_length)
        key = (cache.capacity, first, rows, slots, count, *(buffer.address for buffer in cache.buffers))
        step = graphs.find(key, lambda: self._bound(cache, first, rows))
        if step is None:
            return None
        results = self._ready(step.binding, filled, want_logits=False)
        graphs.run(step)
        asked = given.output_index.shape[1]
        return StepOutput(**{name: value.read()[:, :asked] for name, value in results.items()})

    def _try_graphs(self, graphs: Graphs) -> None:
        """Replay steps on rows of nobody, and capture no more where they do not say what plain steps say."""
        replayed, plain = self.new_cache(1), self.new_cache(1)
        cursor, vocab = 0, 64
        for slots in graphs.sizes:
            index = np.arange(slots)[None]
            for _ in range(4):  # seen, captured, and replayed with other inputs
                ids = (np.arange(cursor, cursor + slots)[None] * 7) % vocab
                given = StepInput(ids, np.array([cursor]), index)
                plain.reserve(cursor + slots)
                found = self._step(replayed, 0, given, want_logits=False)
                right = self._plainly(plain, 0, given, want_logits=False)
                if not graphs.agree(found, right):
                    graphs.give_up("a replayed step does not say what the same step says plainly")
                if graphs.reason:
                    return
                cursor += slots

    def _binding(self, cache: KvRows, first: int, rows: int, want_logits: bool) -> Binding:
        """KV memory of some rows bound as past and present: the cache's last binding while it stands for the
        same.
        """
        bound = (first, rows, want_logits)
        if cache.binding is None or cache.bound != bound or self._binds_anew:
            cache.unbind()
            cache.binding, cache.bound = self._bound(cache, first, rows), bound
        return cache.binding

    def _bound(self, cache: KvRows, first: int, rows: int) -> Binding:
        binding = Binding(self._session, self._places)
        names = [(f"past_key_values.{s}", f"present.{s}" if self._in_place else None) for s in self._suffixes]
        binding.bind_rows(names, cache.buffers, self._memory, self._dtype, rows, first * cache.row_bytes)
        return binding

    def _find_places(self, memory: Memory) -> None:
        """`memory` for what the graph reads or writes there, host memory for the rest."""
        session = self._session
        host: Memory = HostMemory()
        infos = [*zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)]
        infos += zip(session.get_outputs(), session.get_output_memory_infos(), strict=True)
        devices = {tensor.name: info.name.lower() for tensor, info in infos}
        self._places = {name: memory if device == memory.device else host for name, device in devices.items()}
        kv = {device for name, device in devices.items() if name.startswith(("past_key_values.", "present."))}
        self._memory = memory if kv == {memory.device} else host
        # Where operators on KV are not all on one device, ONNX Runtime copies it to and fro as it is bound,
        # so each step binds again.
        self._binds_anew = kv not in ({memory.device}, {"cpu"})
        self._places |= {f"present.{suffix}": self._memory for suffix in self._suffixes}
        if self._graphs and any(place is host for place in self._places.values()):
            self._graphs.reason = "a step's inputs or results are not all on the GPU"


def _import(device: str) -> Any:
    if device not in PROVIDERS:
        raise SessionError(f"unknown device `{device}` (known: {', '.join(PROVIDERS)})")
    install = f"pip install 'mars-export[{EXTRAS[device]}]'"
    os.environ.setdefault(*NO_TELEMETRY)
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise SessionError(f"onnxruntime is not installed; {install}") from error
    if PROVIDERS[device] not in ort.get_available_providers():
        raise SessionError(
            f"this onnxruntime {ort.__version__} has no {PROVIDERS[device]} (it has:"
            f" {', '.join(ort.get_available_providers())});"
            f" pip uninstall onnxruntime, then {install}"
        )
    if device == "cuda":
        load_libraries(ort)
    return ort


def version_and_devices() -> tuple[str, list[str]] | None:
    """The installed ONNX Runtime's version and the devices it can use, or None when it is absent."""
    os.environ.setdefault(*NO_TELEMETRY)
    try:
        import onnxruntime as ort
    except ImportError:
        return None
    return ort.__version__, [
        device for device, provider in PROVIDERS.items() if provider in ort.get_available_providers()
    ]


Results = dict[str, np.ndarray]
"""Output arrays by name."""


def open_graph(
    graph: Path, accuracy_level: int, pack: bool = True
) -> Callable[[Mapping[str, np.ndarray]], Results]:
    """Any graph on the CPU, arrays in and arrays out: for checking parts of a model. Its memory is given back
    when the result is dropped.

    Without `pack` weights are not copied into the layout that products like best, which halves the memory of
    a float graph.
    """
    ort = _import("cpu")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.disable_prepacking", "0" if pack else "1")
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(accuracy_level))
    try:
        session = ort.InferenceSession(graph, options, providers=[PROVIDERS["cpu"]], enable_fallback=0)
    except Exception as error:  # onnxruntime raises its own classes, and plain RuntimeError
        raise SessionError(f"{graph}: ONNX Runtime cannot load the graph: {first_line(error)}") from error
    names = [output.name for output in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, dict(feeds)), strict=True))
