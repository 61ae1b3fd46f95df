"""ONNX Runtime on the CPU: a step bound once by address, KV rows in host memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import machine
from ...bundle.manifest import ModelInfo, Variant
from ...bundle.open import Bundle
from ...decode.backend import StepInput, StepOutput
from ...errors import BundleError, MarsWarning, SessionError
from ..kv import KV_TYPES, KvRows
from ..step_io import IDS
from . import kernels, library
from .kernels import exact_entries

if TYPE_CHECKING:
    from ...decode.backend import Cache

TYPES = {"float32": "tensor(float)", "float16": "tensor(float16)", "int8": "tensor(int8)"}
INT64, FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
# Rotary angles are computed in groups of this size; a remainder would be computed in another way.
REPRODUCIBLE_ANGLES = 16
MAX_SPARE_BYTES, MAX_SPARE = 256, 256  # numbers in a tensor that is kept for later steps, and such tensors
WITHOUT_KERNELS = "without mars-export-kernels {}: `pip install mars-export-kernels`, or export with {}"
SLOW_KV = "its int8 KV entries are slow, and prompts are read several times slower", "--kv float"
SLOW_WEIGHTS = "its 4-bit weights take the memory and the time of 16 bits", "--precision w8a8"


class OrtBackend:
    """An ONNX variant on the CPU. In the KV layouts "in-place" and "cuda" past and present are one buffer; in
    "appended" the new entries of a step are copied into the rows.

    `settings` are ONNX Runtime's own options.
    """

    def __init__(
        self,
        graph: Path,
        variant: Variant,
        model: ModelInfo,
        threads: int | None = None,
        accuracy_level: int = library.FASTEST_LEVEL,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        ort, provider = library.load("cpu")
        entries, _ = library.split_options(settings or {}, library.CPU)
        self.outputs = variant.outputs
        self.max_capacity = model.context_length
        self.max_slots: int | None = None
        self.max_outputs: int | None = None
        self.reproducible_slots: int | None = None
        self._cache_shape = model.entry_shape(variant.kv_dtype, variant.kv_layout)
        self._num_dims = 3 if variant.kv_layout == "cuda" else 4  # of a KV tensor
        self._dtype = KV_TYPES[variant.kv_dtype]
        self._in_place = variant.kv_layout != "appended"
        self._suffixes = model.kv_suffixes
        self._mtp_drafts = model.mtp_drafts
        package = kernels.used(variant.precision, "cpu")
        if variant.is_integer and package is None:
            entries |= exact_entries(ort, entries)
        entries |= {library.LEVEL: str(accuracy_level)}
        threads = threads or machine.default_threads()
        operators = None if package is None else package.library
        self._session = library.open_session(ort, graph, [provider], entries, threads, operators=operators)
        self._widths = check_signature(self._session, graph, variant, model)

    @classmethod
    def open(
        cls,
        bundle: Bundle,
        variant: Variant,
        threads: int | None,
        accuracy_level: int | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> OrtBackend:
        """Load a dynamic ONNX variant of a bundle. `accuracy_level` None is the level at which the export
        measured the drift.
        """
        level = library.level_of(variant, accuracy_level)
        graph, model = bundle.path / variant.file, bundle.manifest.model
        sizes = {entry.path: entry.size for entry in bundle.manifest.files}
        weights = sizes.get(variant.weights or variant.file, 0)
        machine.require(weights, "opening this model", "use a smaller model or narrower weights")
        slow = {"w4a8": SLOW_WEIGHTS}.get(variant.precision, SLOW_KV if variant.kv_dtype == "int8" else ())
        if slow and kernels.used(variant.precision, "cpu") is None:
            warnings.warn(f"{graph}: {WITHOUT_KERNELS.format(*slow)}", MarsWarning, stacklevel=2)
        backend = cls(graph, variant, model, threads, level, settings)
        # These precisions' products add up in one order for every step of two slots or more. Blocks of int4
        # and int8 and half precision have kernels by size.
        is_one_order = variant.is_integer or variant.precision == "float32"
        if is_one_order and model.head_dim % (2 * REPRODUCIBLE_ANGLES) == 0:
            backend.reproducible_slots = 2
        return backend

    @property
    def kv_device(self) -> str:
        """Where KV rows are between two steps."""
        return "cpu"

    def new_cache(self, num_rows: int) -> KvRows:
        return KvRows(len(self._suffixes), num_rows, *self._cache_shape, self._dtype)

    def step(self, cache: Cache, first: int, inputs: StepInput, want_logits: bool) -> StepOutput:
        assert isinstance(cache, KvRows)
        try:
            return self._run(cache, first, inputs, want_logits)
        except BaseException as error:
            cache.unbind()  # it may be incomplete, or refer to memory that is freed with this frame
            if not isinstance(error, Exception) or isinstance(error, SessionError):
                raise
            raise library.failed(error, *inputs.input_ids.shape) from error

    def _run(self, cache: KvRows, first: int, inputs: StepInput, want_logits: bool) -> StepOutput:
        binding = self._binding(cache, first, len(inputs.input_ids), want_logits)
        for name, value in inputs._asdict().items():
            binding.write(name, value)
        rows, outputs = inputs.output_index.shape
        results: dict[str, Any] = {}
        for name in self.outputs:
            if want_logits or name != "logits":
                shape = (rows, outputs + self._mtp_drafts, *self._widths.get(name, ()))
                results[name] = binding.expect(name, shape, INT64 if name in IDS else FLOAT32)
        if self._in_place:
            binding.run()
        else:
            shape = (rows, self._cache_shape[0], inputs.input_ids.shape[1], self._cache_shape[1])
            new = [binding.expect(f"present.{s}", shape, self._dtype) for s in self._suffixes]
            binding.run()
            cache.place(first, inputs.kv_length, new)
        values: dict[str, Any] = {
            n: binding.take(n) if n == "logits" else value.copy() for n, value in results.items()
        }
        return StepOutput(**values, mtp_drafts=self._mtp_drafts)

    def _binding(self, cache: KvRows, first: int, rows: int, want_logits: bool) -> Binding:
        """The KV memory of some rows bound as past and present; the cache's last binding if equal."""
        key = (first, rows, want_logits)
        if cache.binding is None or cache.binding_key != key:
            cache.unbind()
            binding = Binding(self._session)
            names = [(f"past_key_values.{s}", f"present.{s}") for s in self._suffixes]
            shape = (rows, *cache.buffers[0].shape[1 - self._num_dims :])
            offset = first * cache.row_bytes
            binding.bind_rows(names, self._in_place, cache.buffers, self._dtype, shape, offset)
            cache.binding, cache.binding_key = binding, key
        bound: Binding = cache.binding
        return bound


def check_signature(
    session: Any, graph: Path, variant: Variant, model: ModelInfo
) -> dict[str, tuple[int, ...]]:
    """The further dimensions of outputs that have several values for each position. Raises BundleError."""
    heads, entry = model.entry_shape(variant.kv_dtype, variant.kv_layout)
    shape = [None, None, entry] if variant.kv_layout == "cuda" else [None, heads, None, entry]
    kv_type = TYPES[variant.kv_dtype]
    in_place = variant.kv_layout != "appended"  # past and present are one buffer
    pasts = [f"past_key_values.{s}" for s in model.kv_suffixes]
    presents = [f"present.{s}" for s in model.kv_suffixes]
    graph_inputs = {i.name: i for i in session.get_inputs()}
    graph_outputs = {o.name: o for o in session.get_outputs()}
    mismatched = graph_inputs.keys() ^ {"input_ids", "kv_length", "output_index", *pasts}
    mismatched |= graph_outputs.keys() ^ {*variant.outputs, *presents}
    for name, info in [*graph_inputs.items(), *graph_outputs.items()]:
        is_kv = name.startswith(("past_key_values.", "present."))
        sizes = [n if wanted else None for n, wanted in zip(info.shape, shape, strict=False)]
        if is_kv and (len(info.shape), sizes, info.type) != (len(shape), shape, kv_type):
            mismatched.add(name)
    for past_name, present_name in zip(pasts, presents, strict=True):
        past, present = graph_inputs.get(past_name), graph_outputs.get(present_name)
        if past and present and (past.shape[-2] == present.shape[-2]) != in_place:
            mismatched.add(f"{present_name} (KV layout)")
    wide = [name for name in ("logits", "topk_ids", "topk_logprobs") if name in graph_outputs]
    widths = {name: tuple(graph_outputs[name].shape[2:]) for name in wide}
    expected = {"logits": (model.vocab_size,), "topk_logprobs": widths.get("topk_ids")}
    for name, width in widths.items():
        is_valid = all(isinstance(n, int) and 0 < n <= model.vocab_size for n in width)
        if width != expected.get(name, width) or not is_valid:
            mismatched.add(name)
    if mismatched:
        raise BundleError(
            f"{graph}: the graph and the manifest disagree about {', '.join(sorted(mismatched)[:6])};"
            " export again"
        )
    return widths


class Binding:
    """One IO binding, and the memory of all its tensors except the KV rows, which belong to the cache."""

    def __init__(self, session: Any) -> None:
        self._session, self._io = session, session.io_binding()
        self._tensors: dict[str, np.ndarray] = {}
        self._spare: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}  # small ones, for later steps

    def bind_rows(
        self,
        names: Sequence[tuple[str, str]],
        in_place: bool,
        buffers: Sequence[np.ndarray],
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        offset: int,
    ) -> None:
        """Bind rows of KV tensors, `offset` bytes from their beginning, as inputs of `shape`, and
        as outputs if `in_place`. `names` are those of past and present.
        """
        for (past, present), buffer in zip(names, buffers, strict=True):
            place = ("cpu", 0, dtype, shape, buffer.ctypes.data + offset)
            self._io.bind_input(past, *place)
            if in_place:
                self._io.bind_output(present, *place)

    def write(self, name: str, value: np.ndarray) -> None:
        """Set an input. The memory is reused while the shape is the same, because binding takes much longer
        than copying a few ids.
        """
        tensor = self._tensors.get(name)
        if tensor is None or tensor.shape != value.shape:
            tensor = self._tensors[name] = self._tensor(name, value.shape, value.dtype)
            self._io.bind_input(name, "cpu", 0, value.dtype, value.shape, tensor.ctypes.data)
        tensor[...] = value

    def expect(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Memory for an output."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.shape != shape:
            tensor = self._tensors[name] = self._tensor(name, shape, dtype)
            self._io.bind_output(name, "cpu", 0, dtype, shape, tensor.ctypes.data)
        return tensor

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Memory for a tensor whose shape has changed: that of an earlier step of this shape, or new."""
        if prod(shape) > MAX_SPARE_BYTES:
            return np.empty(shape, dtype)
        if (name, shape) not in self._spare:
            if len(self._spare) >= MAX_SPARE:
                self._spare.clear()  # bound tensors stay: `_tensors` has them
            self._spare[name, shape] = np.empty(shape, dtype)
        return self._spare[name, shape]

    def run(self) -> None:
        self._session.run_with_iobinding(self._io)

    def take(self, name: str) -> np.ndarray:
        """An output without a copy; the next step gets other memory."""
        tensor = self._tensors.pop(name)
        self._spare.pop((name, tensor.shape), None)
        return tensor
