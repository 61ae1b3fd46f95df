"""The TensorRT backend: KV memory that is written in place, decode steps that are replayed as CUDA graphs."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np

from ...bundle.manifest import ModelInfo, Variant
from ...bundle.open import Bundle
from ...decode.backend import StepInput, StepOutput
from ...errors import SessionError
from ..cuda import Runs
from ..kv import KV_TYPES
from ..pool import ALIGNMENT, GpuCache, KvMemory, KvPool, per_slice
from ..step_io import StepIO
from .engine import LoadedEngine
from .shape_bucket import ShapeBucket

if TYPE_CHECKING:
    from ...decode.backend import Cache
    from ..cuda import Device

WIDE = ("topk_ids", "topk_logprobs", "logits")  # outputs with several values for each prediction
MAX_CONTEXTS = 32  # execution contexts, each with at most one captured step
CONTEXT_SHARE = 8  # contexts take at most 1 / CONTEXT_SHARE of the memory that is free at opening
CONTEXT_BYTES = 32 << 20  # must be free for a context, whose size is only known afterwards


@dataclass(frozen=True, slots=True)
class Shape:
    """The binding of an execution context: the engine's range, the sizes, the KV memory and its rows."""

    range: int
    slots: int
    outputs: int
    memory: int
    first: int
    rows: int


@dataclass(slots=True)
class BoundContext:
    """An execution context and the Shape that it is bound to.

    `graph` replays the step; None before it is captured, and always if that is refused. `num_bytes`: device
    memory of the context.
    """

    context: Any
    num_bytes: int
    shape: Shape | None = None
    runs: int = 0
    graph: Any = None
    is_refused: bool = False


class TrtBackend:
    """An engine variant on a GPU. Input and output buffers are allocated once; a step copies only ids in and
    results out.
    """

    def __init__(self, engine: LoadedEngine, variant: Variant, model: ModelInfo, device: Device) -> None:
        assert variant.engine is not None
        assert variant.capacity is not None
        # By range, slots and outputs of decode steps; one for each range of prompts. The last is the latest
        # used.
        self._contexts: OrderedDict[tuple[int, int, int], BoundContext] = OrderedDict()
        weakref.finalize(self, _close, device, self._contexts)
        self._engine, self._device, self._info = engine, device, variant.engine
        self.outputs = variant.outputs
        self._model, self._capacity = model, variant.capacity
        self._in_place = variant.kv_layout == "in-place"
        # Padding of an engine with fixed shapes writes to the last `slots` entries of a row, which no cursor
        # reaches. In other engines the rows of a batch share the widest row's slots, so that a row near its
        # end writes more entries than its own.
        rows, slots, outputs = self._info.max_rows, self._info.max_slots, self._info.max_outputs
        self._shape_bucket = ShapeBucket(self._info, variant.capacity, variant.is_fixed)
        self._is_fixed = variant.is_fixed
        widest = max((r.slots.max for r in self._info.ranges if r.name == "decode"), default=1)
        spare = slots if self._is_fixed else widest - 1 if rows > 1 else 0
        self.max_slots: int | None = slots
        self.max_outputs: int | None = outputs
        self.max_capacity = min(model.context_length, self._capacity - spare)
        # an engine has different kernels for different sizes of a step
        self.reproducible_slots: int | None = None
        self._is_prepared = True  # of the last step
        self._item = KV_TYPES[variant.kv_dtype].itemsize
        self._suffixes = model.kv_suffixes
        widths = {name: engine.width(name) for name in WIDE if name in self.outputs}
        entry, heads, count = model.head_dim * self._item, model.num_kv_heads, len(self._suffixes)
        # The new entries of an `appended` engine, one tensor after the other, for steps of any size.
        runs = rows * heads + ALIGNMENT // gcd(ALIGNMENT, entry) - 1
        with device.lock:
            self._io = StepIO(device, rows, slots, outputs, self.outputs, widths)
            self._fresh = 0 if self._in_place else device.allocate(count * runs * slots * entry)
            self._scratch = device.allocate(engine.scratch_bytes)
            self._max_bytes = device.free_memory() // CONTEXT_SHARE
            for key in self._common():
                self._add_context(key)
        empty = KvMemory(0, count, 0, heads, self._capacity, entry)
        max_idle = replace(empty, num_rows=2 * rows - 1 if self._is_fixed else rows).num_bytes
        dtype = KV_TYPES[variant.kv_dtype]
        # Every row has the engine's capacity. The step raises for a row that does not fit.
        self._pool = KvPool(device, empty, lambda _: self._capacity, self._forget, dtype, max_idle)

    @classmethod
    def open(
        cls, bundle: Bundle, variant: Variant, gpu: int = 0, stream: int | None = None, priority: int = 0
    ) -> TrtBackend:
        """Load an engine of a bundle on the GPU of that number; `stream` and `priority` as in Device.

        Raises SessionError that names what the engine was built for and what this machine has.
        """
        from ..cuda import Device

        device = Device(gpu, stream, priority)
        try:
            with device.lock:
                engine = LoadedEngine.load(bundle, variant, gpu)
        except BaseException:
            device.close()
            raise
        with device.lock:
            return cls(engine, variant, bundle.manifest.model, device)

    @property
    def num_graphs(self) -> int:
        """Steps that are replayed as CUDA graphs."""
        return sum(context.graph is not None for context in self._contexts.values())

    def new_cache(self, num_rows: int) -> GpuCache:
        if num_rows > self._info.max_rows:
            raise SessionError(
                f"{num_rows} rows, but this engine was built for at most {self._info.max_rows}; build it"
                f" again with --batch {num_rows}"
            )
        row_bytes = self._model.num_kv_heads * self._capacity * self._model.head_dim * self._item
        if num_rows > 1 and row_bytes % ALIGNMENT:
            raise SessionError(
                f"{num_rows} rows, but with a capacity of {self._capacity} rows of this engine do not begin"
                f" at multiples of {ALIGNMENT} bytes; build it again with a --capacity that is a multiple of"
                " 64"
            )
        # A step of fixed shapes that begins at the last row has max_rows rows from there on.
        return GpuCache(self._pool, num_rows - 1 + self._info.max_rows if self._is_fixed else num_rows)

    def step(self, cache: Cache, first: int, inputs: StepInput, want_logits: bool) -> StepOutput:
        assert isinstance(cache, GpuCache)
        self._is_prepared, (ids, lengths, index) = True, inputs
        parts = [
            self._forward(
                cache.memory,
                first + rows.start,
                StepInput(ids[rows, :slots], lengths[rows], index[rows]),
                want_logits,
            )
            for rows, slots in self._parts(ids.shape[1], lengths, index)
        ]
        outputs: dict[str, Any] = {n: np.concatenate([part[n] for part in parts]) for n in parts[0]}
        return StepOutput(**outputs, is_prepared=self._is_prepared)

    def _parts(self, slots: int, kv_length: np.ndarray, output_index: np.ndarray) -> list[tuple[slice, int]]:
        """Neighbouring rows that can run together, and their slots: one part, unless a row is near its end.

        Such a row has no room for the slots of wider rows. It runs by itself, with its slots up to the last
        that has an output; the later ones are padding.
        """
        parts: list[tuple[slice, int]] = []
        for i, room in enumerate((self._capacity - kv_length).tolist()):
            if room >= slots:
                is_next = bool(parts) and parts[-1][1] == slots and parts[-1][0].stop == i
                start = parts.pop()[0].start if is_next else i
                parts.append((slice(start, i + 1), slots))
                continue
            width = int(output_index[i].max()) + 1
            if width > room:
                raise SessionError(
                    f"a step would write entry {self._capacity - room + width} of a row, this engine holds"
                    f" {self._capacity}; shorten the prompt, or build with a larger --capacity"
                )
            parts.append((slice(i, i + 1), width))
        return parts

    def _forward(
        self, memory: KvMemory, first: int, inputs: StepInput, want_logits: bool
    ) -> dict[str, np.ndarray]:
        rows, count = inputs.output_index.shape
        filled = self._shape_bucket.fill(inputs)
        shape = (*filled.input_ids.shape, filled.output_index.shape[1])
        is_complete = False
        with self._device.lock:
            bound = self._bound(memory, first, *shape)
            try:
                self._io.send(filled)
                self._run(bound)
                if not self._in_place:
                    assert bound.shape is not None
                    self._place(memory, bound.shape, inputs.kv_length)
                results = self._io.fetch(filled.output_index.shape, want_logits)
                is_complete = True
            finally:
                if not is_complete:
                    self._device.synchronize()  # copies still use memory that the next step writes to
            if bound.runs == 1:
                self._engine.keep_kernels()
        return {name: array[:rows, :count] for name, array in results.items()}

    def _bound(self, memory: KvMemory, first: int, rows: int, slots: int, outputs: int) -> BoundContext:
        """The context for this shape, bound to it."""
        index = self._info.range_for(rows, slots, outputs)
        if index is None:
            ranges = "; ".join(
                f"{r.name}: {r.batch.min}-{r.batch.max} x {r.slots.min}-{r.slots.max}"
                for r in self._info.ranges
            )
            raise SessionError(
                f"a step of {rows} x {slots} slots with {outputs} predictions is beyond this engine"
                f" ({ranges}; at most {self._info.max_outputs}"
                " predictions); build one with a larger --batch, --prefill or --block"
            )
        key = (index, slots, outputs) if self._is_decode(index) else (index, 0, 0)
        bound = self._contexts.get(key) or self._add_context(key)
        self._contexts.move_to_end(key)
        shape = Shape(index, slots, outputs, memory.address, first, rows)
        if bound.shape != shape:
            self._unbind(bound)
            self._bind(bound, shape, memory)
        return bound

    def _is_decode(self, index: int) -> bool:
        return self._info.ranges[index].name == "decode"

    def _common(self) -> list[tuple[int, int, int]]:
        """Keys of contexts that are created in advance: for one token, for the engine's fastest size, for the
        largest steps and for prompts.
        """
        keys = []
        for i, r in enumerate(self._info.ranges):
            sizes = [(r.slots.min, r.outputs.min), (r.slots.opt, r.outputs.opt), (r.slots.max, r.outputs.max)]
            keys += [(i, *size) for size in (sizes if self._is_decode(i) else [(0, 0)])]
        return list(dict.fromkeys(keys))

    def _add_context(self, key: tuple[int, int, int]) -> BoundContext:
        """A new, unbound context. The oldest are dropped if there are too many or if they take too much."""
        self._device.require(CONTEXT_BYTES)
        before = self._device.free_memory()
        context = self._engine.new_context(key[0], self._scratch, self._device.stream)
        bound = self._contexts[key] = BoundContext(context, max(0, before - self._device.free_memory()))
        while len(self._contexts) > 1 and (
            len(self._contexts) > MAX_CONTEXTS
            or sum(b.num_bytes for b in self._contexts.values()) > self._max_bytes
        ):
            self._unbind(self._contexts.popitem(last=False)[1])
        return bound

    def _unbind(self, bound: BoundContext) -> None:
        """Drop the graph, which must not outlive its context's binding."""
        if bound.graph is not None:
            self._device.forget(bound.graph)
        bound.shape, bound.graph, bound.runs, bound.is_refused = None, None, 0, False

    def _forget(self, memory: KvMemory) -> None:
        """Unbind all contexts from memory that is freed."""
        for bound in self._contexts.values():
            if bound.shape is not None and bound.shape.memory == memory.address:
                self._unbind(bound)

    def _bind(self, bound: BoundContext, shape: Shape, memory: KvMemory) -> None:
        """Set the context's shapes and addresses. In place, past and present of a KV tensor are the same."""
        context = bound.context
        kv = (shape.rows, memory.kv_heads, memory.capacity, self._model.head_dim)
        shapes = {
            "input_ids": (shape.rows, shape.slots),
            "kv_length": (shape.rows,),
            "output_index": (shape.rows, shape.outputs),
        }
        shapes |= {f"past_key_values.{suffix}": kv for suffix in self._suffixes}
        addresses = self._io.addresses(shape.rows, shape.outputs)
        for suffix, address in zip(self._suffixes, memory.addresses, strict=True):
            first_row = address + shape.first * memory.row_bytes
            addresses[f"past_key_values.{suffix}"] = first_row
            if self._in_place:
                addresses[f"present.{suffix}"] = first_row
        if not self._in_place:
            fresh = self._fresh_runs(shape)
            size = fresh.pitch * fresh.per_slice
            addresses |= {f"present.{s}": fresh.address + i * size for i, s in enumerate(self._suffixes)}
        mismatched = [name for name, size in shapes.items() if not context.set_input_shape(name, size)]
        mismatched += [
            name for name, address in addresses.items() if not context.set_tensor_address(name, address)
        ]
        if mismatched:
            raise SessionError(
                f"the engine and the manifest disagree about {', '.join(mismatched[:6])};"
                " build the engine again"
            )
        bound.shape = shape

    def _run(self, bound: BoundContext) -> None:
        assert bound.shape is not None
        is_decode = self._is_decode(bound.shape.range)
        self._is_prepared &= bound.runs > 1 if is_decode and not bound.is_refused else bound.runs > 0
        # The first run of a context cannot be captured, because TensorRT finishes its preparations in it.
        if is_decode and bound.graph is None and bound.runs > 0 and not bound.is_refused:
            if self._engine.is_capturable(bound.context, self._device.stream):
                bound.graph = self._device.capture(
                    lambda: bool(bound.context.execute_async_v3(int(self._device.stream)))
                )
            bound.is_refused = bound.graph is None
        if bound.graph is not None:
            self._device.launch(bound.graph)
        elif not bound.context.execute_async_v3(int(self._device.stream)):
            self._device.synchronize()  # raises CUDA's own error if the GPU has failed
            raise SessionError(
                f"TensorRT failed in a step of {bound.shape.rows} x {bound.shape.slots} slots:"
                f" {self._engine.last_error()}"
            )
        bound.runs += 1

    def _fresh_runs(self, shape: Shape) -> Runs:
        """The memory of an `appended` engine's new entries: the slots of each head, row and tensor."""
        run = shape.slots * self._model.head_dim * self._item
        return Runs(self._fresh, run, per_slice(shape.rows * self._model.num_kv_heads, run))

    def _place(self, memory: KvMemory, shape: Shape, kv_length: np.ndarray) -> None:
        """Copy an `appended` engine's new entries to each row's cursor, all tensors in one copy for each
        row.
        """
        fresh, heads = self._fresh_runs(shape), memory.kv_heads
        for i, length in enumerate(kv_length.tolist()):
            source = replace(fresh, address=fresh.address + i * heads * fresh.pitch)
            target = memory.runs(shape.first + i, length)
            self._device.copy_runs(target, source, fresh.pitch, heads, memory.count)


def _close(device: Device, contexts: dict[tuple[int, int, int], BoundContext]) -> None:
    """Free the graphs, then the contexts from which they were captured, then the memory of both."""
    try:
        with device.lock:
            device.synchronize()
            for bound in contexts.values():
                if bound.graph is not None:
                    device.forget(bound.graph)
    except SessionError:
        pass  # the GPU has failed: its memory is freed with the process
    contexts.clear()
    device.close()
