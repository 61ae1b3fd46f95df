"""ONNX Runtime on a GPU: steps of a few shapes, at fixed addresses, replayed as CUDA graphs."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...bundle.manifest import Variant
from ...bundle.open import Bundle
from ...decode.backend import StepInput, StepOutput
from ...errors import MarsWarning, SessionError
from ..kv import KV_TYPES
from ..name import DeviceName, GpuOptions
from ..pool import GpuCache, KvMemory, KvPool
from ..step_io import IDS, StepIO, padded, smallest_fit
from . import library
from .signature import check_signature

if TYPE_CHECKING:
    from ...decode.backend import Cache
    from ..cuda import Device

# GPU memory grows by what is needed, not in powers of two, so that the rest is left for KV rows. Products of
# float32 are not rounded to TF32, which is the provider's default, so that answers equal those of the CPU.
# Norms of sums (SkipSimplifiedLayerNormalization) add squares up in float32, not in half precision.
SETTINGS = {
    "arena_extend_strategy": "kSameAsRequested",
    "use_tf32": "0",
    "enable_skip_layer_norm_strict_mode": "1",
}
"""Options of the provider."""
# Outside of layers: operators on shapes, positions and masks. All others process hidden states or logits.
SMALL = {
    "Shape", "Squeeze", "Unsqueeze", "Range", "Concat", "Cast", "Add", "Sub", "Mul", "LessOrEqual", "Greater",
    "And", "Cos", "Sin", "GreaterOrEqual",
}  # fmt: skip
SHAPES = ("rows_of_slot", "query_rows_shape")  # nodes of other operators that compute shapes
LARGE = ("allowed", "shifted", "weighted")  # nodes of these operators that are as large as logits
CHUNKS = (32, 64, 128, 256, 512)  # slots of steps that are wider than a decode step
PLACE = "cuda"  # ONNX Runtime's name of the memory
MIN_CAPACITY = 512
MAX_SHAPES = 64  # bound shapes, each with at most one captured step
MULTIPLE = 8  # of the slots of a decode step
NO_CAPTURE = "cannot use the graph capture feature"  # ONNX Runtime, of a graph that is partly on the CPU
EAGER = -1  # gpu_graph_id of a step that is not captured
INT64, FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)


@dataclass(slots=True)
class BoundShape:
    """The binding of one shape of step to KV memory, and how often it ran in the thread that ran it last.

    ONNX Runtime has a captured step for each thread.
    """

    binding: Any
    eager: Any
    captured: Any
    graph_id: int
    thread: int = 0
    runs: int = 0


class CudaBackend:
    """A dynamic ONNX variant of a bundle that writes its KV entries in place, on a GPU.

    Every decode step has the same number of slots, so that it is captured once for each number of rows; the
    padding comes after the real slots, and its entries are overwritten. Only graphs in the layout "cuda" are
    captured.
    """

    def __init__(
        self,
        bundle: Bundle,
        variant: Variant,
        name: DeviceName,
        settings: Mapping[str, str] | None = None,
        gpu: GpuOptions | None = None,
    ) -> None:
        self._ort, provider = library.load("cuda")  # says how to install it; CUDA may be missing alike
        from ..cuda import Device

        gpu, level = gpu or GpuOptions(), library.level_of(variant)
        graph, model = bundle.path / variant.file, bundle.manifest.model
        entries, options = library.split_options(settings or {}, name)
        self._number = int(options.get("device_id", 0))
        self._device = device = Device(self._number, gpu.stream, gpu.priority)
        self._live: dict[str, Any] = {}
        self._shapes: OrderedDict[tuple[int, ...], BoundShape] = OrderedDict()
        weakref.finalize(self, _close, device, self._shapes, self._live)  # also if this fails below
        self._is_flat = variant.kv_layout == "cuda"
        # Other graphs have a Split whose sizes ONNX Runtime copies from host memory that it frees after the
        # run: a replay would read other bytes.
        default = SETTINGS | {library.GRAPHS: str(int(self._is_flat))}
        options = default | options | {"user_compute_stream": str(int(device.stream))}
        entries |= {library.LEVEL: str(level), "session.record_ep_graph_assignment_info": "1"}
        try:
            session = self._session(graph, provider, options, entries)
        except SessionError as error:
            if NO_CAPTURE not in str(error):
                raise
            warnings.warn(
                f"{error}; steps are not captured as CUDA graphs, and are slower", MarsWarning, stacklevel=2
            )
            options[library.GRAPHS] = "0"
            session = self._session(graph, provider, options, entries)
        self._captures = options[library.GRAPHS] != "0"
        self._live["session"] = session
        if provider not in session.get_providers():
            raise SessionError(
                f"{graph}: ONNX Runtime could not start {provider} and would compute on the CPU"
                f"{library.GPU_ADVICE}"
            )
        self._widths = check_signature(session, graph, variant, model)
        self.on_cpu, large = on_cpu(session, provider)
        """Operator -> number of nodes that the CPU computes."""
        if large:
            _report_on_cpu(graph, provider, large, strict=gpu.strict)
        self.outputs = variant.outputs
        self.max_capacity = model.context_length
        self.decode_slots = -(-(2 * bundle.manifest.block - 1) // MULTIPLE) * MULTIPLE
        self.max_slots: int | None = CHUNKS[-1]
        self.max_outputs: int | None = self.decode_slots
        self.reproducible_slots: int | None = None
        self._sizes = {self.decode_slots, *(n for n in CHUNKS if n > self.decode_slots)}
        self._suffixes, self._mtp_drafts = model.kv_suffixes, model.mtp_drafts
        self._dtype = KV_TYPES[variant.kv_dtype]
        heads, width = model.entry_shape(variant.kv_dtype, variant.kv_layout)
        empty = KvMemory(0, len(self._suffixes), 0, heads, MIN_CAPACITY, width * self._dtype.itemsize)
        self._pool = KvPool(device, empty, self._capacity_for, self._forget, self._dtype)
        self._io: StepIO | None = None
        self._io_rows = self._next_id = 0

    def _session(self, graph: Path, provider: str, options: dict[str, str], entries: dict[str, str]) -> Any:
        providers = [(provider, options)]
        return library.open_session(self._ort, graph, providers, entries, remedy=library.GPU_ADVICE)

    def new_cache(self, num_rows: int) -> GpuCache:
        if num_rows > self._io_rows:
            with self._device.lock:
                self._drop(list(self._shapes))
                if self._io is not None:
                    self._io.free()
                widths = {name: int(np.prod(width)) for name, width in self._widths.items()}
                outputs = self.decode_slots + self._mtp_drafts
                self._io = StepIO(self._device, num_rows, CHUNKS[-1], outputs, self.outputs, widths)
                self._io_rows = num_rows
        return GpuCache(self._pool, num_rows)

    def step(self, cache: Cache, first: int, inputs: StepInput, want_logits: bool) -> StepOutput:
        assert isinstance(cache, GpuCache)
        assert self._io is not None
        memory, (ids, kv_length, output_index) = cache.memory, inputs
        rows, slots = ids.shape
        width = smallest_fit(self._sizes, slots, memory.capacity - int(kv_length.max()))
        filled = StepInput(padded(ids, rows, width), kv_length, padded(output_index, rows, self.decode_slots))
        key = (memory.address, first, rows, width)
        with self._device.lock:
            try:
                self._io.send(filled)
                bound = self._bound(key, memory)
                is_prepared = self._run(bound, is_decode=width == self.decode_slots)
                results = self._io.fetch((rows, self.decode_slots + self._mtp_drafts), want_logits)
            except BaseException as error:
                with suppress(SessionError):
                    self._device.synchronize()  # copies still read what the next step writes
                self._drop([key])
                if not isinstance(error, Exception) or isinstance(error, SessionError):
                    raise
                raise library.failed(error, rows, slots) from error
        return StepOutput(**results, mtp_drafts=self._mtp_drafts, is_prepared=is_prepared)

    def _run(self, bound: BoundShape, *, is_decode: bool) -> bool:
        """Run a step; whether it was replayed, or cannot be. The first of a shape is not captured, because
        it may be the only one.
        """
        if not (is_decode and self._captures):
            self._live["session"].run_with_iobinding(bound.binding, bound.eager)
            bound.runs += 1
            return bound.runs > 1
        if bound.thread != threading.get_ident():
            bound.thread, bound.runs = threading.get_ident(), 0
        # The run before a capturing one allocates what both need: allocating ends a capture.
        for options in [(bound.eager,), (bound.eager, bound.captured), (bound.captured,)][min(bound.runs, 2)]:
            self._live["session"].run_with_iobinding(bound.binding, options)
        bound.runs += 1
        return bound.runs > 2

    def _bound(self, key: tuple[int, ...], memory: KvMemory) -> BoundShape:
        """The binding of a shape: KV memory as past and present, inputs and results in their fixed places."""
        if key in self._shapes:
            self._shapes.move_to_end(key)
            return self._shapes[key]
        if len(self._shapes) >= MAX_SHAPES:
            self._drop([next(iter(self._shapes))])
        _, first, rows, width = key
        io, place = self._live["session"].io_binding(), (PLACE, self._number)
        dim = memory.entry_bytes // self._dtype.itemsize
        kv = (rows, memory.capacity, dim) if self._is_flat else (rows, memory.kv_heads, memory.capacity, dim)
        for suffix, address in zip(self._suffixes, memory.addresses, strict=True):
            row = (*place, self._dtype, kv, address + first * memory.row_bytes)
            io.bind_input(f"past_key_values.{suffix}", *row)
            io.bind_output(f"present.{suffix}", *row)
        outputs = self.decode_slots
        inputs = {"input_ids": (rows, width), "kv_length": (rows,), "output_index": (rows, outputs)}
        assert self._io is not None
        addresses = self._io.addresses(rows, outputs + self._mtp_drafts)
        for name, shape in inputs.items():
            io.bind_input(name, *place, INT64, shape, addresses[name])
        for name in self.outputs:
            shape = (rows, outputs + self._mtp_drafts, *self._widths.get(name, ()))
            io.bind_output(name, *place, INT64 if name in IDS else FLOAT32, shape, addresses[name])
        self._next_id += 1
        eager, captured = (self._run_options(number) for number in (EAGER, self._next_id))
        bound = self._shapes[key] = BoundShape(io, eager, captured, self._next_id)
        return bound

    def _run_options(self, graph_id: int) -> Any:
        """Options of a run that leaves waiting for the stream to us."""
        options = self._ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(graph_id))
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return options

    def _drop(self, keys: list[tuple[int, ...]]) -> None:
        """Release bindings, and what was captured with them."""
        for key in keys:
            bound = self._shapes.pop(key, None)
            if bound is not None and self._captures:
                self._live["session"].release_captured_graph(bound.graph_id)

    def _forget(self, memory: KvMemory) -> None:
        """Release what is bound to memory that is freed."""
        self._drop([key for key in self._shapes if key[0] == memory.address])

    def _capacity_for(self, capacity: int) -> int:
        """Powers of two, with room for the padding of a decode step: a new capacity is captured again."""
        needed = max(MIN_CAPACITY, capacity + self.decode_slots)
        most = -(-(self.max_capacity + self.decode_slots) // MIN_CAPACITY) * MIN_CAPACITY
        return max(needed, min(most, 1 << (needed - 1).bit_length()))


def _close(device: Device, shapes: dict[Any, BoundShape], live: dict[str, Any]) -> None:
    """Free the bindings and the session with its graphs, then the memory and the stream that they use."""
    with device.lock:
        shapes.clear()
        live.clear()
    device.close()


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
