"""The TensorRT backend: KV memory on the device, written in place, and decode steps replayed as CUDA graphs.

Names neither library.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np

from ...bundle.manifest import ModelInfo, Variant
from ...bundle.open import Bundle
from ...decode.backend import StepOutput
from ...errors import SessionError
from ..filling import Filling
from ..kv import KV_TYPES
from .cuda import Runs
from .engine import LoadedEngine
from .io import StepIO
from .memory import ALIGNMENT, KvMemory, Pool, TrtCache, per_slice

if TYPE_CHECKING:
    from ...decode.backend import Cache
    from .cuda import Device

WIDE = ("topk_ids", "topk_logprobs", "logits")  # several values for each prediction
MOST_CONTEXTS = 32  # execution contexts, each with a captured step at most
CONTEXT_SHARE = 8  # they take at most one part of so many of the memory that is free at opening
CONTEXT_BYTES = 32 << 20  # must be free for one: what it takes is only known afterwards


@dataclass(frozen=True, slots=True)
class Shape:
    """What an execution context is bound to: the engine's range, the sizes, and the rows of which memory."""

    range: int
    slots: int
    outputs: int
    memory: int
    first: int
    rows: int


@dataclass(slots=True)
class Step:
    """An execution context and the Shape it is bound to. `graph` replays that step; None until it was
    captured, or for ever if that is refused. `num_bytes` of device memory are the context's.
    """

    context: Any
    num_bytes: int
    shape: Shape | None = None
    runs: int = 0
    graph: Any = None
    is_refused: bool = False


class TrtBackend:
    """An engine variant on a GPU. Input and output buffers are allocated once; a step copies ids in and ids
    out.
    """

    def __init__(self, engine: LoadedEngine, variant: Variant, model: ModelInfo, device: Device) -> None:
        assert variant.engine is not None
        assert variant.capacity is not None
        # By range, slots and outputs of decode steps; one for each range of prompts. The latest used last.
        self._steps: OrderedDict[tuple[int, int, int], Step] = OrderedDict()
        weakref.finalize(self, _close, device, self._steps)
        self._engine, self._device, self._info = engine, device, variant.engine
        self.outputs = variant.outputs
        self._model, self._capacity = model, variant.capacity
        self._in_place = variant.kv_layout == "static"
        # A step of an engine with fixed shapes is filled up with rows and slots that nobody asked for. What
        # they write goes to the last `slots` entries of a row, which no cursor reaches. Elsewhere the rows of
        # a batch share the widest row's slots, so that a row near its end writes on.
        rows, slots, outputs = self._info.max_rows, self._info.max_slots, self._info.max_outputs
        self._filling = Filling(self._info, variant.capacity, variant.is_fixed)
        self._is_fixed = variant.is_fixed
        widest = max((r.slots.max for r in self._info.ranges if r.name == "decode"), default=1)
        spare = slots if self._is_fixed else widest - 1 if rows > 1 else 0
        self.max_slots: int | None = slots
        self.max_outputs: int | None = outputs
        self.max_capacity = min(model.context_length, self._capacity - spare)
        self.firm_slots: int | None = None  # an engine has kernels by the size of a step
        self._item = KV_TYPES[variant.kv_dtype].itemsize
        self._suffixes = [f"{i}.{kind}" for i in range(model.num_layers) for kind in ("key", "value")]
        widths = {name: engine.width(name) for name in WIDE if name in self.outputs}
        entry, heads, count = model.head_dim * self._item, model.num_kv_heads, len(self._suffixes)
        # What a `delta` engine gives, one tensor behind the other, of any step.
        runs = rows * heads + ALIGNMENT // gcd(ALIGNMENT, entry) - 1
        with device.turn:
            self._io = StepIO(device, rows, slots, outputs, self.outputs, widths)
            self._fresh = 0 if self._in_place else device.allocate(count * runs * slots * entry)
            self._scratch = device.allocate(engine.scratch_bytes)
            self._most_bytes = device.free_memory() // CONTEXT_SHARE
            for key in self._common():
                self._add_context(key)
        head = self._capacity * entry
        empty = KvMemory(0, count, heads * head, head, entry, 0, heads, self._capacity)
        most = 2 * rows - 1 if self._is_fixed else rows
        self._pool = Pool(device, empty, most, self._forget, KV_TYPES[variant.kv_dtype])

    @classmethod
    def of(
        cls, bundle: Bundle, variant: Variant, gpu: int = 0, stream: int | None = None, priority: int = 0
    ) -> TrtBackend:
        """Load an engine of a bundle on the GPU of that number; `stream` and `priority` as Device has them.
        Raises SessionError that names what it is for and what is here.
        """
        from .cuda import Device

        device = Device(gpu, stream, priority)
        try:
            with device.turn:
                engine = LoadedEngine.of(bundle, variant, gpu)
        except BaseException:
            device.close()
            raise
        with device.turn:
            return cls(engine, variant, bundle.manifest.model, device)

    @property
    def num_graphs(self) -> int:
        """Steps that are replayed as CUDA graphs."""
        return sum(step.graph is not None for step in self._steps.values())

    @property
    def kv_device(self) -> str:
        """Where KV rows are between two steps."""
        return "cuda"

    def new_cache(self, num_rows: int) -> TrtCache:
        if num_rows > self._info.max_rows:
            raise SessionError(
                f"{num_rows} rows, but this engine was built for at most {self._info.max_rows}; build it"
                f" again with"
                f" --batch {num_rows}"
            )
        row_bytes = self._model.num_kv_heads * self._capacity * self._model.head_dim * self._item
        if num_rows > 1 and row_bytes % ALIGNMENT:
            raise SessionError(
                f"{num_rows} rows, but with a capacity of {self._capacity} rows of this engine do not begin"
                f" at multiples"
                f" of {ALIGNMENT} bytes; build it again with a --capacity that is a multiple of 64"
            )
        # A step of fixed shapes that begins at the last row touches as many rows behind it as the engine has.
        return TrtCache(self._pool, num_rows - 1 + self._info.max_rows if self._is_fixed else num_rows)

    def step(
        self,
        cache: Cache,
        first: int,
        input_ids: np.ndarray,
        kv_length: np.ndarray,
        output_index: np.ndarray,
        want_logits: bool,
    ) -> StepOutput:
        assert isinstance(cache, TrtCache)
        parts = [
            self._forward(
                cache.memory,
                first + rows.start,
                input_ids[rows, :slots],
                kv_length[rows],
                output_index[rows],
                want_logits,
            )
            for rows, slots in self._parts(input_ids.shape[1], kv_length, output_index)
        ]
        return StepOutput(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})

    def _parts(self, slots: int, kv_length: np.ndarray, output_index: np.ndarray) -> list[tuple[slice, int]]:
        """Neighbouring rows that can run together, and their slots: one part, unless a row is near its end.

        Such a row shares a step with wider ones and has no room for their slots. It runs by itself, as wide
        as the last slot it wants to hear of; what is behind that slot is filling.
        """
        parts: list[tuple[slice, int]] = []
        for i, room in enumerate((self._capacity - kv_length).tolist()):
            if room >= slots:
                is_next = bool(parts) and parts[-1][1] == slots and parts[-1][0].stop == i
                start = parts.pop()[0].start if is_next else i
                parts.append((slice(start, i + 1), slots))
                continue
            own = int(output_index[i].max()) + 1
            if own > room:
                raise SessionError(
                    f"a step would write entry {self._capacity - room + own} of a row, this engine holds"
                    f" {self._capacity}; shorten the prompt, or build with a larger --capacity"
                )
            parts.append((slice(i, i + 1), own))
        return parts

    def _forward(
        self,
        memory: KvMemory,
        first: int,
        input_ids: np.ndarray,
        kv_length: np.ndarray,
        output_index: np.ndarray,
        want_logits: bool,
    ) -> dict[str, np.ndarray]:
        rows, count = output_index.shape
        ids, lengths, index = self._filling.fill(input_ids, kv_length, output_index)
        is_settled = False
        with self._device.turn:
            step = self._step(memory, first, len(ids), ids.shape[1], index.shape[1])
            try:
                self._io.send(ids, lengths, index)
                self._run(step)
                if not self._in_place:
                    assert step.shape is not None
                    self._place(memory, step.shape, kv_length)
                results = self._io.fetch(index.shape, want_logits)
                is_settled = True
            finally:
                if not is_settled:
                    self._device.synchronize()  # the copies still use what the next step writes to
            if step.runs == 1:
                self._engine.keep_kernels()
        return {name: array[:rows, :count] for name, array in results.items()}

    def _step(self, memory: KvMemory, first: int, rows: int, slots: int, outputs: int) -> Step:
        """The context for this shape, bound to it."""
        at = self._info.range_for(rows, slots, outputs)
        if at is None:
            ranges = "; ".join(
                f"{r.name}: {r.batch.min}-{r.batch.max} x {r.slots.min}-{r.slots.max}"
                for r in self._info.ranges
            )
            raise SessionError(
                f"a step of {rows} x {slots} slots with {outputs} predictions is beyond this engine"
                f" ({ranges}; at most {self._info.max_outputs}"
                " predictions); build one with a larger --batch, --prefill or --block"
            )
        key = (at, slots, outputs) if self._is_decode(at) else (at, 0, 0)
        step = self._steps.get(key) or self._add_context(key)
        self._steps.move_to_end(key)
        shape = Shape(at, slots, outputs, memory.address, first, rows)
        if step.shape != shape:
            self._unbind(step)
            self._bind(step, shape, memory)
        return step

    def _is_decode(self, at: int) -> bool:
        return self._info.ranges[at].name == "decode"

    def _common(self) -> list[tuple[int, int, int]]:
        """Of one token, of the size that the engine is fastest at, of the largest steps and of prompts:
        none of their contexts is made during an answer.
        """
        keys = []
        for at, r in enumerate(self._info.ranges):
            sizes = [(r.slots.min, r.outputs.min), (r.slots.opt, r.outputs.opt), (r.slots.max, r.outputs.max)]
            keys += [(at, *size) for size in (sizes if self._is_decode(at) else [(0, 0)])]
        return list(dict.fromkeys(keys))

    def _add_context(self, key: tuple[int, int, int]) -> Step:
        """A new context, bound to nothing. The oldest go where they are many or take much."""
        self._device.require(CONTEXT_BYTES)
        before = self._device.free_memory()
        context = self._engine.new_context(key[0], self._scratch, self._device.stream)
        step = self._steps[key] = Step(context, max(0, before - self._device.free_memory()))
        while len(self._steps) > 1 and (
            len(self._steps) > MOST_CONTEXTS
            or sum(each.num_bytes for each in self._steps.values()) > self._most_bytes
        ):
            self._unbind(self._steps.popitem(last=False)[1])
        return step

    def _unbind(self, step: Step) -> None:
        """Its graph goes before the context is bound to something else, or goes itself."""
        if step.graph is not None:
            self._device.forget(step.graph)
        step.shape, step.graph, step.runs, step.is_refused = None, None, 0, False

    def _forget(self, memory: KvMemory) -> None:
        """No step that is bound to this memory may run again."""
        for step in self._steps.values():
            if step.shape is not None and step.shape.memory == memory.address:
                self._unbind(step)

    def _bind(self, step: Step, shape: Shape, memory: KvMemory) -> None:
        """Give the context its shapes and addresses; past and present of a KV tensor are one address."""
        context = step.context
        kv = (shape.rows, memory.kv_heads, memory.capacity, self._model.head_dim)
        shapes = {
            "input_ids": (shape.rows, shape.slots),
            "kv_length": (shape.rows,),
            "output_index": (shape.rows, shape.outputs),
        }
        shapes |= {f"past_key_values.{suffix}": kv for suffix in self._suffixes}
        addresses = self._io.addresses(shape.rows, shape.outputs)
        for suffix, address in zip(self._suffixes, memory.addresses, strict=True):
            here = address + shape.first * memory.row_bytes
            addresses[f"past_key_values.{suffix}"] = here
            if self._in_place:
                addresses[f"present.{suffix}"] = here
        if not self._in_place:
            fresh = self._fresh_runs(shape)
            size = fresh.pitch * fresh.per_slice
            addresses |= {f"present.{s}": fresh.address + i * size for i, s in enumerate(self._suffixes)}
        odd = [name for name, size in shapes.items() if not context.set_input_shape(name, size)]
        odd += [name for name, address in addresses.items() if not context.set_tensor_address(name, address)]
        if odd:
            raise SessionError(
                f"the engine and the manifest disagree about {', '.join(odd[:6])}; build the engine again"
            )
        step.shape = shape

    def _run(self, step: Step) -> None:
        assert step.shape is not None
        is_decode = self._is_decode(step.shape.range)
        # TensorRT finishes its preparations in the first run of a context, which therefore cannot be
        # captured.
        if is_decode and step.graph is None and step.runs > 0 and not step.is_refused:
            if self._engine.is_capturable(step.context, self._device.stream):
                step.graph = self._device.capture(
                    lambda: bool(step.context.execute_async_v3(int(self._device.stream)))
                )
            step.is_refused = step.graph is None
        if step.graph is not None:
            self._device.launch(step.graph)
        elif not step.context.execute_async_v3(int(self._device.stream)):
            self._device.synchronize()  # a GPU that has failed says so in its own words
            raise SessionError(
                f"TensorRT failed in a step of {step.shape.rows} x {step.shape.slots} slots:"
                f" {self._engine.last_error()}"
            )
        step.runs += 1

    def _fresh_runs(self, shape: Shape) -> Runs:
        """Where a `delta` engine puts the new entries of a step: the slots of each head, row and tensor."""
        run = shape.slots * self._model.head_dim * self._item
        return Runs(self._fresh, run, per_slice(shape.rows * self._model.num_kv_heads, run))

    def _place(self, memory: KvMemory, shape: Shape, kv_length: np.ndarray) -> None:
        """Copy a `delta` engine's new entries behind each row's cursor: one copy a row, of every tensor."""
        fresh, heads = self._fresh_runs(shape), memory.kv_heads
        for i, length in enumerate(kv_length.tolist()):
            source = replace(fresh, address=fresh.address + i * heads * fresh.pitch)
            target = memory.runs(shape.first + i, length)
            self._device.copy_runs(target, source, fresh.pitch, heads, memory.count)


def _close(device: Device, steps: dict[tuple[int, int, int], Step]) -> None:
    """Graphs, then the contexts that they were captured from, then the memory of both."""
    try:
        with device.turn:
            device.synchronize()
            for step in steps.values():
                if step.graph is not None:
                    device.forget(step.graph)
    except SessionError:
        pass  # the GPU has failed: what is there goes with the process
    steps.clear()
    device.close()
