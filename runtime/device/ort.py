"""The ONNX Runtime backend: IO binding by address, KV written in place. The only file that names onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..bundle.manifest import Bundle, ModelInfo, Variant
from ..decode.backend import StepOutput, bucket
from ..errors import BundleError, SessionError

if TYPE_CHECKING:
    from ..decode.backend import Cache

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
KV_DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16)}
ORT_TYPES = {"float32": "tensor(float)", "float16": "tensor(float16)"}
EXTRAS = {"cpu": "cpu", "cuda": "gpu"}
# Of products with int4 and int8 weights: 0 and 1 compute in fp32, 2 in fp16, 3 in bf16, 4 with activations in 8-bit blocks.
ACCURACY_LEVELS = (0, 1, 2, 3, 4)
FASTEST_LEVEL = 4
LEVELED = ("int4", "int8")
NO_KERNELS = "ONNX Runtime has no bfloat16 kernels; this graph is for TensorRT (`mars-export trt`), or export with --precision fp16 or fp32"


class OrtCache:
    """KV buffers in host memory: one [rows, kv_heads, capacity, head_dim] array for each layer's keys and values."""

    def __init__(
        self, names: list[str], num_rows: int, kv_heads: int, head_dim: int, dtype: np.dtype
    ) -> None:
        self.names, self.num_rows = names, num_rows
        self.kv_heads, self.head_dim, self.dtype = kv_heads, head_dim, dtype
        self.capacity = 0
        self.buffers: list[np.ndarray] = []
        self.binding: Any = None
        self.bound: tuple[int, int, int, bool] | None = (
            None  # what it stands for: first row, rows, capacity, logits wanted
        )
        self.arrays: dict[str, np.ndarray] = {}  # what is bound besides KV memory

    def reserve(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        grown = bucket(capacity, self.capacity)
        shape = (self.num_rows, self.kv_heads, grown, self.head_dim)
        for i in range(len(self.names)):
            # Zeros, not garbage: an entry that is masked out still enters the product 0 * value, and 0 * NaN is NaN.
            fresh = np.zeros(shape, self.dtype)
            if self.capacity:
                fresh[:, :, : self.capacity] = self.buffers[i]
                self.buffers[i] = fresh
            else:
                self.buffers.append(fresh)
        self.capacity = grown

    def move(self, source: int, target: int, length: int) -> None:
        for buffer in self.buffers:
            buffer[target, :, :length] = buffer[source, :, :length]

    def place(self, first: int, kv_length: np.ndarray, new: list[np.ndarray]) -> None:
        """Put a step's new entries [rows, kv_heads, slots, head_dim] at kv_length of the rows first, first + 1, ..."""
        rows, _, slots, _ = new[0].shape
        row, entry = np.arange(first, first + rows)[:, None], kv_length[:, None] + np.arange(slots)
        for buffer, entries in zip(self.buffers, new, strict=True):
            buffer[row, :, entry] = entries.transpose(0, 2, 1, 3)  # [rows, slots, kv_heads, head_dim]


class OrtBackend:
    """A step graph in an ONNX Runtime session. `outputs` are the prediction outputs it must have; KV tensors follow `model`."""

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
    ) -> None:
        ort = _import(device)
        self.outputs = outputs
        self.max_capacity = model.context_length
        self.max_slots: int | None = None
        self.max_outputs: int | None = None
        self._vocab = model.vocab_size
        self._cache_shape = (model.num_kv_heads, model.head_dim)
        self._dtype = KV_DTYPES[kv_dtype]
        self._in_place, self._on_host = kv_layout == "static", device == "cpu"
        self._suffixes = [f"{i}.{kind}" for i in range(model.num_layers) for kind in ("key", "value")]
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(accuracy_level))
        if threads is not None:
            options.intra_op_num_threads = threads
        try:
            self._session = ort.InferenceSession(graph, options, providers=[PROVIDERS[device]])
        except Exception as error:  # onnxruntime raises its own classes, and plain RuntimeError
            raise SessionError(
                f"{graph}: ONNX Runtime cannot load the graph: {_first_line(error)}"
            ) from error
        self._check_signature(graph, ORT_TYPES[kv_dtype])

    @classmethod
    def of(
        cls,
        bundle: Bundle,
        variant: Variant,
        device: str,
        threads: int | None,
        accuracy_level: int | None = None,
    ) -> OrtBackend:
        """Load a dynamic ONNX variant of a bundle; `accuracy_level` None is the one its drift was measured at."""
        if accuracy_level is not None and variant.precision not in LEVELED:
            raise SessionError(
                f"variant {variant.name} is {variant.precision}: an accuracy level is for {' and '.join(LEVELED)} weights"
            )
        level = accuracy_level if accuracy_level is not None else variant.accuracy_level
        level = FASTEST_LEVEL if level is None else level
        if level not in ACCURACY_LEVELS:
            raise SessionError(
                f"accuracy level must be one of {', '.join(map(str, ACCURACY_LEVELS))}, not {level}"
            )
        graph, model = bundle.path / variant.file, bundle.manifest.model
        return cls(graph, variant.outputs, model, variant.kv_dtype, device, threads, level, variant.kv_layout)

    def new_cache(self, num_rows: int) -> OrtCache:
        return OrtCache(self._suffixes, num_rows, *self._cache_shape, self._dtype)

    def step(
        self,
        cache: Cache,
        first: int,
        input_ids: np.ndarray,
        kv_length: np.ndarray,
        output_index: np.ndarray,
        want_logits: bool,
    ) -> StepOutput:
        assert isinstance(cache, OrtCache)
        rows = input_ids.shape[0]
        binding = self._binding(cache, first, rows, want_logits)
        for name, array in (
            ("input_ids", input_ids),
            ("kv_length", kv_length),
            ("output_index", output_index),
        ):
            self._bind_input(cache, name, array)
        new = [] if self._in_place else self._bind_new_entries(binding, input_ids.shape)
        results = {
            name: self._bind_result(cache, name, output_index.shape)
            for name in self.outputs
            if name != "logits" or want_logits
        }
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime raises its own classes, and plain RuntimeError
            raise SessionError(
                f"ONNX Runtime failed in a step of {rows} x {input_ids.shape[1]} slots: {_first_line(error)}"
            ) from error
        if new:
            cache.place(first, kv_length, new)
        # Copies, because the next step of this shape writes there again.
        return StepOutput(
            **{name: array if name == "logits" else array.copy() for name, array in results.items()}
        )

    def _binding(self, cache: OrtCache, first: int, rows: int, want_logits: bool) -> Any:
        """KV memory of some rows bound as past and present: the cache's last binding while it still stands for the same memory.

        Another device gets a copy of a host array when it is bound, so there every step binds anew.
        """
        wanted = (first, rows, cache.capacity, want_logits)
        if cache.bound == wanted and self._on_host:
            return cache.binding
        cache.bound, cache.binding, cache.arrays = None, self._session.io_binding(), {}
        shape = (rows, *cache.buffers[0].shape[1:])
        for suffix, buffer in zip(self._suffixes, cache.buffers, strict=True):
            address = buffer.ctypes.data + first * buffer.strides[0]
            cache.binding.bind_input(f"past_key_values.{suffix}", "cpu", 0, self._dtype, shape, address)
            if self._in_place:
                cache.binding.bind_output(f"present.{suffix}", "cpu", 0, self._dtype, shape, address)
        cache.bound = wanted
        return cache.binding

    def _bind_input(self, cache: OrtCache, name: str, value: np.ndarray) -> None:
        """Binding takes far longer than copying a few ids: an array that is bound is written again as long as the shape stays."""
        array = cache.arrays.get(name)
        if array is None or array.shape != value.shape:
            array = cache.arrays[name] = value.copy()
            cache.binding.bind_input(name, "cpu", 0, np.int64, array.shape, array.ctypes.data)
        else:
            array[...] = value

    def _bind_result(self, cache: OrtCache, name: str, shape: tuple[int, ...]) -> np.ndarray:
        array = cache.arrays.get(name)
        if array is None or array.shape[:2] != shape or name == "logits":
            dtype = np.int64 if name == "token_ids" else np.float32
            array = cache.arrays[name] = np.empty((*shape, self._vocab) if name == "logits" else shape, dtype)
            cache.binding.bind_output(name, "cpu", 0, dtype, array.shape, array.ctypes.data)
        return array

    def _bind_new_entries(self, binding: Any, window: tuple[int, ...]) -> list[np.ndarray]:
        """Memory for a `delta` graph's new entries, [rows, kv_heads, slots, head_dim] for each KV tensor."""
        rows, slots = window
        kv_heads, head_dim = self._cache_shape
        new = [np.empty((rows, kv_heads, slots, head_dim), self._dtype) for _ in self._suffixes]
        for suffix, array in zip(self._suffixes, new, strict=True):
            binding.bind_output(f"present.{suffix}", "cpu", 0, self._dtype, array.shape, array.ctypes.data)
        return new

    def _check_signature(self, graph: Path, cache_type: str) -> None:
        wanted_in = {
            "input_ids",
            "kv_length",
            "output_index",
            *(f"past_key_values.{s}" for s in self._suffixes),
        }
        wanted_out = {*self.outputs, *(f"present.{s}" for s in self._suffixes)}
        inputs = {i.name: i for i in self._session.get_inputs()}
        outputs = {o.name: o for o in self._session.get_outputs()}
        odd = (inputs.keys() ^ wanted_in) | (outputs.keys() ^ wanted_out)
        for name, info in [*inputs.items(), *outputs.items()]:
            is_cache = name.startswith(("past_key_values.", "present."))
            if is_cache and ((info.shape[1], info.shape[3]) != self._cache_shape or info.type != cache_type):
                odd.add(name)
        for suffix in self._suffixes:
            past, present = inputs.get(f"past_key_values.{suffix}"), outputs.get(f"present.{suffix}")
            # In place the two are one buffer; a `delta` graph's output has the slots' entries only.
            if past and present and (past.shape[2] == present.shape[2]) != self._in_place:
                odd.add(f"present.{suffix} (KV layout)")
        if "logits" in outputs and outputs["logits"].shape[2] != self._vocab:
            odd.add("logits")
        if odd:
            raise BundleError(
                f"{graph}: the graph and the manifest disagree about {', '.join(sorted(odd)[:6])}; export again"
            )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _import(device: str) -> Any:
    if device not in PROVIDERS:
        raise SessionError(f"unknown device `{device}` (known: {', '.join(PROVIDERS)})")
    install = f"pip install 'mars-export[{EXTRAS[device]}]'"
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise SessionError(f"onnxruntime is not installed; {install}") from error
    if PROVIDERS[device] not in ort.get_available_providers():
        raise SessionError(
            f"this onnxruntime {ort.__version__} has no {PROVIDERS[device]} (it has: {', '.join(ort.get_available_providers())});"
            f" pip uninstall onnxruntime, then {install}"
        )
    return ort


def version_and_devices() -> tuple[str, list[str]] | None:
    """The installed ONNX Runtime's version and the devices it can use, or None when it is absent."""
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
    """Any graph on the CPU, arrays in and arrays out: for checking parts of a model. Its memory is given back when the result is dropped.

    Without `pack` weights are not copied into the layout that products like best, which halves the memory of a float graph.
    """
    ort = _import("cpu")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.disable_prepacking", "0" if pack else "1")
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(accuracy_level))
    try:
        session = ort.InferenceSession(graph, options, providers=[PROVIDERS["cpu"]])
    except Exception as error:  # onnxruntime raises its own classes, and plain RuntimeError
        raise SessionError(f"{graph}: ONNX Runtime cannot load the graph: {_first_line(error)}") from error
    names = [output.name for output in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, dict(feeds)), strict=True))
