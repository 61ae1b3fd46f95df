"""ONNX Runtime on the CPU: a step bound once by address, KV rows in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import machine
from ...bundle.manifest import Variant
from ...bundle.open import Bundle
from ...decode.backend import StepInput, StepOutput
from ...errors import SessionError
from ..kv import KV_TYPES, KvRows
from ..states import MAX_OUTPUTS
from ..step_io import IDS
from . import kernels, library
from .kernels import exact_entries
from .signature import check_signature

if TYPE_CHECKING:
    from ...decode.backend import Cache

INT64, FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
# Rotary angles are computed in groups of this size; a remainder would be computed in another way.
REPRODUCIBLE_ANGLES = 16
REPRODUCIBLE_RATES = 4  # so are the rates of recurrent heads
MAX_SPARE_BYTES, MAX_SPARE = 256, 256  # numbers in a tensor that is kept for later steps, and such tensors


class OrtBackend:
    """A dynamic ONNX variant of a bundle on the CPU. In the KV layouts "in-place" and "cuda" past and present
    are one buffer; in "appended" the new entries of a step are copied into the rows.

    `settings` are ONNX Runtime's own options.
    """

    def __init__(
        self,
        bundle: Bundle,
        variant: Variant,
        threads: int | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        graph, model = bundle.path / variant.file, bundle.manifest.model
        level = library.level_of(variant)
        weights = sum(f.size for f in bundle.manifest.files if f.path == (variant.weights or variant.file))
        machine.require(weights, "opening this model", "use a smaller model or narrower weights")
        package = kernels.used(variant, graph)
        if model.recurrent is not None:
            library.check_recurrent()
        ort, provider = library.load("cpu")
        entries, _ = library.split_options(settings or {}, library.CPU)
        if variant.is_integer and package is None:
            entries |= exact_entries(ort, entries)
        entries |= {library.LEVEL: str(level)}
        threads = threads or machine.default_threads()
        operators = None if package is None else package.library
        self._session = library.open_session(ort, graph, [provider], entries, threads, operators=operators)
        self._widths = check_signature(self._session, graph, variant, model)
        self.outputs, self.max_capacity = variant.outputs, model.context_length
        self.max_slots: int | None = None
        self.max_outputs: int | None = MAX_OUTPUTS if model.recurrent else None
        # These precisions' products add up in one order for every step of two slots or more. Blocks of int4
        # and int8 and half precision have kernels by size.
        is_one_order = variant.is_integer or variant.precision == "float32"
        is_reproducible = is_one_order and model.head_dim % (2 * REPRODUCIBLE_ANGLES) == 0
        if model.recurrent is not None:
            is_reproducible = is_reproducible and model.recurrent.heads % REPRODUCIBLE_RATES == 0
        self.reproducible_slots = 2 if is_reproducible else None
        self._cache_shape = model.entry_shape(variant.kv_dtype, variant.kv_layout)
        self._num_dims = 3 if variant.kv_layout == "cuda" else 4  # of a KV tensor
        self._dtype = KV_TYPES[variant.kv_dtype]
        self._in_place = variant.kv_layout != "appended"
        self._suffixes, self._mtp_drafts = model.kv_suffixes, model.mtp_drafts
        self._recurrent = model.recurrent

    def new_cache(self, num_rows: int) -> KvRows:
        return KvRows(len(self._suffixes), num_rows, *self._cache_shape, self._dtype, self._recurrent)

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
        of_step = slice(first, first + len(inputs.input_ids))
        if cache.states is not None:
            binding.write("state_length", cache.states.begin(of_step, inputs.kv_length))
        rows, outputs = inputs.output_index.shape
        results: dict[str, Any] = {}
        for name in self.outputs:
            if want_logits or name != "logits":
                shape = (rows, outputs + self._mtp_drafts, *self._widths.get(name, ()))
                results[name] = binding.expect(name, shape, INT64 if name in IDS else FLOAT32)
        if self._in_place:
            binding.run()
            if cache.states is not None:  # they have all tokens before the first output
                cache.states.lengths[of_step] = inputs.kv_length + inputs.output_index[:, 0]
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
            shape = (rows, *cache.buffers[0].shape[1 - self._num_dims :])
            for suffix, buffer in zip(self._suffixes, cache.buffers, strict=True):
                place = ("cpu", 0, self._dtype, shape, buffer.ctypes.data + first * cache.row_bytes)
                binding.io.bind_input(f"past_key_values.{suffix}", *place)
                if self._in_place:
                    binding.io.bind_output(f"present.{suffix}", *place)
            for suffix, states in {} if cache.states is None else cache.states.buffers.items():
                part = states[first : first + rows]
                place = ("cpu", 0, FLOAT32, part.shape, part.ctypes.data)
                binding.io.bind_input(f"past_key_values.{suffix}", *place)
                binding.io.bind_output(f"present.{suffix}", *place)
            cache.binding, cache.binding_key = binding, key
        bound: Binding = cache.binding
        return bound


class Binding:
    """One IO binding, and the memory of all its tensors except the KV rows, which belong to the cache."""

    def __init__(self, session: Any) -> None:
        self._session, self.io = session, session.io_binding()
        self._tensors: dict[str, np.ndarray] = {}
        self._spare: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}  # small ones, for later steps

    def write(self, name: str, value: np.ndarray) -> None:
        """Set an input. The memory is reused while the shape is the same, because binding takes much longer
        than copying a few ids.
        """
        tensor = self._tensors.get(name)
        if tensor is None or tensor.shape != value.shape:
            tensor = self._tensors[name] = self._tensor(name, value.shape, value.dtype)
            self.io.bind_input(name, "cpu", 0, value.dtype, value.shape, tensor.ctypes.data)
        tensor[...] = value

    def expect(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Memory for an output."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.shape != shape:
            tensor = self._tensors[name] = self._tensor(name, shape, dtype)
            self.io.bind_output(name, "cpu", 0, dtype, shape, tensor.ctypes.data)
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
        self._session.run_with_iobinding(self.io)

    def take(self, name: str) -> np.ndarray:
        """An output without a copy; the next step gets other memory."""
        tensor = self._tensors.pop(name)
        self._spare.pop((name, tensor.shape), None)
        return tensor
