"""ONNX Runtime on the CPU: a step bound by address, KV rows in host memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import machine
from ...bundle.manifest import ModelInfo, Variant
from ...bundle.open import Bundle
from ...decode.backend import StepInput, StepOutput
from ...errors import MarsWarning, SessionError
from ..kv import KV_TYPES, KvRows
from ..step_io import IDS
from . import kernels, library
from .binding import Binding, check_signature
from .kernels import exact_entries

if TYPE_CHECKING:
    from ...decode.backend import Cache

INT64, FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
# Rotary angles are computed in groups of this size; a remainder would be computed in another way.
REPRODUCIBLE_ANGLES = 16
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
            dtype = INT64 if name in IDS else FLOAT32
            results[name] = binding.expect(name, (*predictions, *self._widths.get(name, ())), dtype)
        return results

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
        return cache.binding
