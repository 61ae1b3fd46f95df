"""The ONNX Runtime backend: a step bound by address, KV rows on the CPU or on a GPU."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import machine
from ...bundle.manifest import ModelInfo, Variant
from ...bundle.open import Bundle
from ...decode.backend import StepInput, StepOutput
from ...errors import DeviceLost, MarsWarning, SessionError
from ..failures import RESTART, first_line, is_lasting, memory_advice, require
from ..kv import KV_TYPES, KvRows
from ..memory import HostMemory
from ..name import DeviceName, GpuOptions
from . import kernels, library
from .binding import Binding, check_signature
from .cuda_memory import CudaMemory, Memory
from .kernels import exact_entries

if TYPE_CHECKING:
    from ...decode.backend import Cache

KV_DTYPES = {name: KV_TYPES[name] for name in ("float32", "float16", "int8")}
INT64, FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
# GPU memory grows by what is needed, not in powers of two, so that the rest is left for KV rows. Products of
# float32 are not rounded to TF32, which is the provider's default, so that answers equal those of the CPU.
# Norms of sums (SkipSimplifiedLayerNormalization) add squares up in float32, not in half precision.
SETTINGS = {
    "cpu": {},
    "cuda": {
        "arena_extend_strategy": "kSameAsRequested",
        "use_tf32": "0",
        "enable_skip_layer_norm_strict_mode": "1",
    },
}
# Outside of layers: operators on shapes, positions and masks. All others process hidden states or logits.
SMALL = {
    "Shape", "Squeeze", "Unsqueeze", "Range", "Concat", "Cast", "Add", "Sub", "Mul", "LessOrEqual", "Greater",
    "And", "Cos", "Sin", "GreaterOrEqual",
}  # fmt: skip
SHAPES = ("rows_of_slot", "query_rows_shape")  # nodes of other operators that compute shapes
LARGE = ("allowed", "shifted", "weighted")  # nodes of these operators that are as large as logits
# Of products with int4 and int8 weights: 0 and 1 compute in fp32, 2 in fp16, 3 in bf16, 4 with activations in
# 8-bit blocks.
ACCURACY_LEVELS = (0, 1, 2, 3, 4)
FASTEST_LEVEL = 4
LEVELED = ("int4", "int8")
# Precisions whose products on a CPU add up in one order for every step of two slots or more. Blocks of int4
# and int8 and half precision have kernels by size.
REPRODUCIBLE = ("float32", "w8a8")
# Rotary angles are computed in groups of this size; a remainder would be computed in another way.
REPRODUCIBLE_ANGLES = 16
GPU_ADVICE = (
    "; check the GPU with nvidia-smi and the CUDA libraries with `mars-export doctor`, or give --device cpu"
)
NO_KERNELS = (
    "ONNX Runtime has no bfloat16 kernels; this graph is for TensorRT (`mars-export trt`), or export with"
    " --precision fp16 or fp32"
)


class OrtBackend:
    """An ONNX variant on a device. In the KV layout "in-place" past and present are one buffer, and in
    "cuda", where rows have one wide head; in "appended" the new entries of a step are copied into the rows.

    `memory`: where KV rows should be; by default the device's. `settings` are ONNX Runtime's own options.
    """

    def __init__(
        self,
        graph: Path,
        variant: Variant,
        model: ModelInfo,
        device: str = "cpu",
        threads: int | None = None,
        accuracy_level: int = FASTEST_LEVEL,
        memory: Memory | None = None,
        settings: Mapping[str, str] | None = None,
        gpu: GpuOptions | None = None,
    ) -> None:
        name, gpu = DeviceName.parse(device), gpu or GpuOptions()
        ort, provider = library.load(name.kind)
        entries, provider_options = library.split_options(settings or {}, name)
        provider_options = SETTINGS[name.kind] | provider_options
        self.outputs = variant.outputs
        self.max_capacity = model.context_length
        self.max_slots: int | None = None
        self.max_outputs: int | None = None
        self.reproducible_slots: int | None = None
        self._cache_shape = model.entry_shape(variant.kv_dtype, variant.kv_layout)
        self._num_dims = 3 if variant.kv_layout == "cuda" else 4  # of a KV tensor
        self._dtype = KV_DTYPES[variant.kv_dtype]
        self._in_place = variant.kv_layout != "appended"
        self._suffixes = model.kv_suffixes
        self._mtp_drafts = model.mtp_drafts
        is_gpu = name.kind != "cpu"
        package = kernels.used(variant.precision, name.kind)
        if variant.precision == "w8a8" and not is_gpu and package is None:
            entries |= exact_entries(ort, entries)
        entries |= {
            library.LEVEL: str(accuracy_level),
            "session.record_ep_graph_assignment_info": str(int(is_gpu)),
        }
        memory = memory or _memory(name.kind, int(provider_options.get("device_id", 0)), gpu)
        if isinstance(memory, CudaMemory) and (gpu.stream is not None or gpu.priority):
            provider_options["user_compute_stream"] = str(int(memory.stream))
        providers, remedy = [(provider, provider_options)], GPU_ADVICE if is_gpu else ""
        threads = threads or machine.default_threads()
        operators = None if package is None else package.library
        self._session = library.open_session(
            ort, graph, providers, entries, threads, operators=operators, remedy=remedy
        )
        if provider not in self._session.get_providers():
            raise SessionError(
                f"{graph}: ONNX Runtime could not start {provider} and would compute on the CPU{GPU_ADVICE}"
            )
        self._widths = check_signature(self._session, graph, variant, model)
        self._find_places(memory)
        self.on_cpu: dict[str, int] = {}
        """Operator -> number of nodes that a GPU session computes on the CPU."""
        if is_gpu:
            self.on_cpu, large = on_cpu(self._session, provider)
            if large:
                _report_on_cpu(graph, provider, large, strict=gpu.strict)

    @classmethod
    def open(
        cls,
        bundle: Bundle,
        variant: Variant,
        device: str,
        threads: int | None,
        accuracy_level: int | None = None,
        settings: Mapping[str, str] | None = None,
        gpu: GpuOptions | None = None,
    ) -> OrtBackend:
        """Load a dynamic ONNX variant of a bundle. `accuracy_level` None is the level at which the export
        measured the drift.
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
        if device == "cpu":
            sizes = {entry.path: entry.size for entry in bundle.manifest.files}
            weights = sizes.get(variant.weights or variant.file, 0)
            require(weights, "opening this model", "use a smaller model or narrower weights")
        backend = cls(graph, variant, model, device, threads, level, settings=settings, gpu=gpu)
        if (
            device == "cpu"
            and variant.precision in REPRODUCIBLE
            and model.head_dim % (2 * REPRODUCIBLE_ANGLES) == 0
        ):
            backend.reproducible_slots = 2
        return backend

    @property
    def kv_device(self) -> str:
        """Where KV rows are between two steps."""
        return self._memory.device

    def new_cache(self, num_rows: int) -> KvRows:
        return KvRows(self._memory, len(self._suffixes), num_rows, *self._cache_shape, self._dtype)

    def step(self, cache: Cache, first: int, inputs: StepInput, want_logits: bool) -> StepOutput:
        assert isinstance(cache, KvRows)
        try:
            return self._run(cache, first, inputs, want_logits)
        except BaseException as error:
            cache.unbind()  # it may be incomplete, or refer to memory that is freed with this frame
            if not isinstance(error, Exception) or isinstance(error, SessionError):
                raise
            # onnxruntime raises its own classes, and plain RuntimeError
            rows, slots = inputs.input_ids.shape
            what = f"ONNX Runtime failed in a step of {rows} x {slots} slots: {first_line(error)}"
            if is_lasting(str(error)):
                raise DeviceLost(what + RESTART) from error
            advice = memory_advice(error)
            raise SessionError(what + advice, code="out_of_memory" if advice else "failed") from error

    def _run(self, cache: KvRows, first: int, inputs: StepInput, want_logits: bool) -> StepOutput:
        rows, slots = inputs.input_ids.shape
        binding = self._binding(cache, first, rows, want_logits)
        results = self._bind_step(binding, inputs, want_logits)
        if self._in_place:
            binding.run()
        else:
            shape = (rows, self._cache_shape[0], slots, self._cache_shape[1])
            new = [binding.expect(f"present.{s}", shape, self._dtype) for s in self._suffixes]
            binding.run()
            cache.place(first, inputs.kv_length, new)
        if want_logits and "logits" in results:
            results["logits"] = binding.take("logits")
        values = {n: value if n == "logits" else value.read() for n, value in results.items()}
        return StepOutput(**values, mtp_drafts=self._mtp_drafts)

    def _bind_step(self, binding: Binding, inputs: StepInput, want_logits: bool) -> dict[str, Any]:
        """Write the inputs of a step; return the memory of its results, by name."""
        for name, value in inputs._asdict().items():
            binding.write(name, value)
        rows, outputs = inputs.output_index.shape
        predictions = rows, outputs + self._mtp_drafts
        results: dict[str, Any] = {}
        for name in self.outputs:
            if name == "logits" and not want_logits:
                continue
            dtype = INT64 if name in ("token_ids", "topk_ids") else FLOAT32
            results[name] = binding.expect(name, (*predictions, *self._widths.get(name, ())), dtype)
        return results

    def _binding(self, cache: KvRows, first: int, rows: int, want_logits: bool) -> Binding:
        """The KV memory of some rows bound as past and present; the cache's last binding if equal."""
        key = (first, rows, want_logits)
        if cache.binding is None or cache.binding_key != key or self._must_rebind:
            cache.unbind()
            binding = Binding(self._session, self._places)
            names = [(f"past_key_values.{s}", f"present.{s}") for s in self._suffixes]
            offset = first * cache.row_bytes
            shape = (rows, *cache.buffers[0].shape[1 - self._num_dims :])
            binding.bind_rows(names, self._in_place, cache.buffers, self._memory, self._dtype, shape, offset)
            cache.binding, cache.binding_key = binding, key
        return cache.binding

    def _find_places(self, memory: Memory) -> None:
        """Choose `memory` for tensors that the graph reads or writes there, host memory for the others."""
        session = self._session
        host: Memory = HostMemory()
        infos = [*zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)]
        infos += zip(session.get_outputs(), session.get_output_memory_infos(), strict=True)
        devices = {tensor.name: info.name.lower() for tensor, info in infos}
        self._places = {name: memory if device == memory.device else host for name, device in devices.items()}
        kv = {device for name, device in devices.items() if name.startswith(("past_key_values.", "present."))}
        self._memory = memory if kv == {memory.device} else host
        # If operators on KV are on several devices, ONNX Runtime copies KV when it is bound, so each step
        # must bind again.
        self._must_rebind = kv not in ({memory.device}, {"cpu"})
        self._places |= {f"present.{suffix}": self._memory for suffix in self._suffixes}


def _memory(device: str, number: int, gpu: GpuOptions) -> Memory:
    if device == "cpu":
        return HostMemory()
    from ..cuda import Device

    return CudaMemory(Device(number, gpu.stream, gpu.priority), device, number)


def on_cpu(session: Any, provider: str) -> tuple[dict[str, int], dict[str, int]]:
    """Operator -> number of nodes of a session's graph that run elsewhere than on `provider`; and the same of
    those on hidden states or logits, whose inputs and outputs are copied in every step.
    """
    parts = [part for part in session.get_provider_graph_assignment_info() if part.ep_name != provider]
    nodes = [node for part in parts for node in part.get_nodes()]
    large = [node for node in nodes if _is_large(node.op_type, node.name)]
    counts, large_counts = (dict(Counter(n.op_type for n in group).most_common()) for group in (nodes, large))
    return counts, large_counts


def _is_large(operator: str, name: str) -> bool:
    if name.startswith("layers."):
        return operator not in ("Shape", "Constant")
    return name in LARGE or (operator not in SMALL and name not in SHAPES)


def _report_on_cpu(graph: Path, provider: str, large: Mapping[str, int], *, strict: bool) -> None:
    total, names = sum(large.values()), ", ".join(f"{count} {name}" for name, count in large.items())
    words = (
        f"{graph}: {provider} leaves {total} operators on hidden states to the CPU ({names}): up to"
        f" {2 * total} copies between CPU and GPU in every step; install onnxruntime-gpu 1.27 or newer, or"
        " build a TensorRT engine (mars-export trt)"
    )
    if strict:
        raise SessionError(words)
    warnings.warn(words, MarsWarning, stacklevel=2)
