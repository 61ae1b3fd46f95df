"""The ONNX Runtime backend: a step bound by address, KV in place, on a CPU or a GPU. Only this file imports
it.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import machine
from ...bundle.manifest import ModelInfo, Variant
from ...bundle.open import Bundle
from ...decode.backend import StepOutput
from ...errors import DeviceLost, MarsWarning, SessionError
from ..kv import KvRows
from ..lost import ADVICE, advice, first_line, is_lasting
from ..memory import HostMemory, Memory
from ..name import DeviceName, OnGpu
from ..trt.libraries import load_libraries
from .binding import Binding, StepInput
from .cuda_memory import CudaMemory
from .options import parted
from .products import require_exact
from .signature import KvLayout, check_signature

if TYPE_CHECKING:
    from ...decode.backend import Cache

# The names of a device's provider, the first that is there is taken. CUDA's is a plugin where the library
# lies beside ONNX Runtime's own, or where somebody has registered it.
PROVIDERS = {
    "cpu": ("CPUExecutionProvider",),
    "cuda": ("CUDAExecutionProvider", "CudaPluginExecutionProvider"),
}
CUDA_PLUGIN = "libonnxruntime_providers_cuda_plugin.so"
KV_DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16)}
INT64, FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
ORT_TYPES = {"float32": "tensor(float)", "float16": "tensor(float16)"}
# Read when the library is loaded. Since 1.31 it tells its makers what it runs, from threads of its own that
# take memory when they like, and the process with them where they get none.
NO_TELEMETRY = ("ORT_DISABLE_TELEMETRY", "1")
EXTRAS = {"cpu": "cpu", "cuda": "gpu"}
# Memory of a GPU is asked for as it is needed, not in powers of two: what is left is for KV rows.
# Products of float32 are not rounded to TF32, as the provider does by itself: answers equal the CPU's.
SETTINGS = {"cpu": {}, "cuda": {"arena_extend_strategy": "kSameAsRequested", "use_tf32": "0"}}
# Outside of layers: operators on shapes, positions and masks. All others have hidden states or logits.
SMALL = {
    "Shape", "Squeeze", "Unsqueeze", "Range", "Concat", "Cast", "Add", "Sub", "Mul", "LessOrEqual", "Greater",
    "And", "Cos", "Sin",
}  # fmt: skip
LARGE = ("allowed", "shifted", "weighted")  # nodes that are none the less as large as logits
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
    `device`.
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
        settings: Mapping[str, str] | None = None,
        on_gpu: OnGpu | None = None,
    ) -> None:
        name = DeviceName.of(device)
        device = name.kind
        ort, provider = _import(device)
        on_gpu = on_gpu or OnGpu()
        entries, own = parted(settings or {}, name)
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
        threads = threads or machine.default_threads()
        if threads is not None:
            options.intra_op_num_threads = threads
        try:
            for key, value in entries.items():
                options.add_session_config_entry(key, value)
            own = SETTINGS[device] | own
            memory = memory or _memory(device, int(own.get("device_id", 0)), on_gpu)
            if isinstance(memory, CudaMemory) and on_gpu != OnGpu(strict=on_gpu.strict):
                own["user_compute_stream"] = str(int(memory.stream))
            # Its fallback to the CPU is off: it prints to the standard output, and tries the same again.
            self._session = ort.InferenceSession(
                graph, options, providers=[(provider, own)], enable_fallback=0
            )
        except SessionError:
            raise
        except Exception as error:  # onnxruntime raises its own classes, and plain RuntimeError
            then = "" if device == "cpu" else f"; {GPU_ADVICE}"
            raise SessionError(
                f"{graph}: ONNX Runtime cannot load the graph: {first_line(error)}{then}"
            ) from error
        if provider not in self._session.get_providers():
            raise SessionError(
                f"{graph}: ONNX Runtime could not start {provider} and would compute on the CPU; {GPU_ADVICE}"
            )
        layout = KvLayout(self._suffixes, self._cache_shape, ORT_TYPES[kv_dtype], self._in_place)
        self._widths = check_signature(self._session, graph, self.outputs, layout, model.vocab_size)
        self._find_places(memory)
        self.on_cpu: dict[str, int] = {}
        """Operator -> how many nodes of the graph a GPU session computes on the CPU."""
        if device != "cpu":
            self.on_cpu, large = on_cpu(self._session, provider)
            if large:
                _tell(graph, provider, large, strict=on_gpu.strict)

    @classmethod
    def of(
        cls,
        bundle: Bundle,
        variant: Variant,
        device: str,
        threads: int | None,
        accuracy_level: int | None = None,
        settings: Mapping[str, str] | None = None,
        on_gpu: OnGpu | None = None,
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
            machine.require(weights, "opening this model", "use a smaller model or narrower weights")
        backend = cls(
            graph, variant.outputs, model, variant.kv_dtype, device, threads, level, variant.kv_layout,
            settings=settings, on_gpu=on_gpu,
        )  # fmt: skip
        if device == "cpu" and variant.precision == "w8a8":
            require_exact(_import(device)[0], settings or {})
        if device == "cpu" and variant.precision in FIRM and model.head_dim % (2 * FIRM_ANGLES) == 0:
            backend.firm_slots = 2
        return backend

    @property
    def kv_device(self) -> str:
        """Where KV rows are between two steps."""
        return self._memory.device

    def new_cache(self, num_rows: int) -> KvRows:
        return KvRows(self._memory, len(self._suffixes), num_rows, *self._cache_shape, self._dtype)

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
        try:
            return self._run(cache, first, given, want_logits)
        except BaseException as error:
            cache.unbind()  # it may be half made, or name memory that goes with this frame
            if not isinstance(error, Exception) or isinstance(error, SessionError):
                raise
            # onnxruntime raises its own classes, and plain RuntimeError
            rows, slots = given.input_ids.shape
            what = f"ONNX Runtime failed in a step of {rows} x {slots} slots: {first_line(error)}"
            if is_lasting(str(error)):
                raise DeviceLost(what + ADVICE) from error
            raise SessionError(what + advice(error), code="failed") from error

    def _run(self, cache: KvRows, first: int, given: StepInput, want_logits: bool) -> StepOutput:
        rows, slots = given.input_ids.shape
        binding = self._binding(cache, first, rows, want_logits)
        results = self._ready(binding, given, want_logits)
        if self._in_place:
            binding.run()
        else:
            shape = (rows, self._cache_shape[0], slots, self._cache_shape[1])
            new = [binding.expect(f"present.{s}", shape, self._dtype) for s in self._suffixes]
            binding.run()
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


def _memory(device: str, number: int, on_gpu: OnGpu) -> Memory:
    if device == "cpu":
        return HostMemory()
    from ..trt.cuda import Device

    return CudaMemory(Device(number, on_gpu.stream, on_gpu.priority), device, number)


def on_cpu(session: Any, provider: str) -> tuple[dict[str, int], dict[str, int]]:
    """Operator -> how many nodes of a session's graph run elsewhere than on `provider`; and of those on
    hidden states or logits alone: what they read and give is copied in every step.
    """
    parts = [part for part in session.get_provider_graph_assignment_info() if part.ep_name != provider]
    nodes = [node for part in parts for node in part.get_nodes()]
    large = [node for node in nodes if _is_large(node.op_type, node.name)]
    every, some = (dict(Counter(n.op_type for n in group).most_common()) for group in (nodes, large))
    return every, some


def _is_large(operator: str, name: str) -> bool:
    if name.startswith("layers."):
        return operator not in ("Shape", "Constant")
    return operator not in SMALL or name in LARGE


def _tell(graph: Path, provider: str, large: Mapping[str, int], *, strict: bool) -> None:
    total, names = sum(large.values()), ", ".join(f"{count} {name}" for name, count in large.items())
    words = (
        f"{graph}: {provider} leaves {total} operators on hidden states to the CPU ({names}): up to"
        f" {2 * total} copies between CPU and GPU in every step; install onnxruntime-gpu 1.27 or newer, or"
        " build a TensorRT engine (mars-export trt)"
    )
    if strict:
        raise SessionError(words)
    warnings.warn(words, MarsWarning, stacklevel=2)


def _import(device: str) -> tuple[Any, str]:
    """The library and the name of the device's provider in it. Raises SessionError where one is absent."""
    if device not in PROVIDERS:
        raise SessionError(f"unknown device `{device}` (known: {', '.join(PROVIDERS)})")
    install = f"pip install 'mars-export[{EXTRAS[device]}]'"
    os.environ.setdefault(*NO_TELEMETRY)
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise SessionError(f"onnxruntime is not installed; {install}") from error
    provider = _provider(ort, device)
    if provider is None:
        raise SessionError(
            f"this onnxruntime {ort.__version__} has no {PROVIDERS[device][0]} (it has:"
            f" {', '.join(ort.get_available_providers())});"
            f" pip uninstall onnxruntime, then {install}"
        )
    if device == "cuda":
        load_libraries(ort)
    return ort, provider


def _provider(ort: Any, device: str) -> str | None:
    """The first of a device's providers that this library has, built in or as a registered plugin."""
    plugin = Path(ort.__file__).parent / "capi" / CUDA_PLUGIN
    known = {*ort.get_available_providers(), *(d.ep_name for d in ort.get_ep_devices())}
    if device == "cuda" and known.isdisjoint(PROVIDERS["cuda"]) and plugin.exists():
        ort.register_execution_provider_library(PROVIDERS["cuda"][1], str(plugin))
        known |= {d.ep_name for d in ort.get_ep_devices()}
    return next((name for name in PROVIDERS[device] if name in known), None)


def version_and_devices() -> tuple[str, list[str]] | None:
    """The installed ONNX Runtime's version and the devices it can use, or None when it is absent."""
    os.environ.setdefault(*NO_TELEMETRY)
    try:
        import onnxruntime as ort
    except ImportError:
        return None
    return ort.__version__, [device for device in PROVIDERS if _provider(ort, device) is not None]


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
    ort, provider = _import("cpu")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.disable_prepacking", "0" if pack else "1")
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(accuracy_level))
    try:
        session = ort.InferenceSession(graph, options, providers=[provider], enable_fallback=0)
    except Exception as error:  # onnxruntime raises its own classes, and plain RuntimeError
        raise SessionError(f"{graph}: ONNX Runtime cannot load the graph: {first_line(error)}") from error
    names = [output.name for output in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, dict(feeds)), strict=True))
