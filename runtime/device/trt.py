"""The TensorRT backend: KV memory on the device, written in place, and decode steps replayed as CUDA graphs.
Names neither library.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..bundle.manifest import Bundle, ModelInfo, Variant
from ..decode.backend import StepOutput
from ..errors import SessionError
from .trt_engine import LoadedEngine

if TYPE_CHECKING:
    from ..decode.backend import Cache
    from .cuda import Device

ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
INPUTS = ("input_ids", "kv_length", "output_index")
MOST_GRAPHS = 64  # captured steps kept; each holds an execution context


@dataclass(frozen=True, slots=True)
class KvMemory:
    """Device addresses of the KV tensors, each [rows, kv_heads, capacity, head_dim]; the sizes in bytes."""

    addresses: tuple[int, ...]
    row_bytes: int
    head_bytes: int
    entry_bytes: int
    num_rows: int
    kv_heads: int
    capacity: int

    @property
    def tensor_bytes(self) -> int:
        return self.num_rows * self.row_bytes


class TrtCache:
    """KV rows on the device. Their memory goes back to the backend when the cache is no longer used."""

    def __init__(self, device: Device, lock: threading.RLock, memory: KvMemory) -> None:
        self._device, self._lock, self.memory = device, lock, memory

    @property
    def capacity(self) -> int:
        return self.memory.capacity

    def reserve(self, capacity: int) -> None:
        if capacity > self.capacity:
            raise SessionError(
                f"a step would write entry {capacity} of a row, this engine holds {self.capacity};"
                " shorten the prompt, or build with a larger --capacity"
            )

    def move(self, source: int, target: int, length: int) -> None:
        memory = self.memory
        if length == 0:
            return
        with self._lock:
            for address in memory.addresses:
                there, here = address + target * memory.row_bytes, address + source * memory.row_bytes
                self._device.copy_rows(
                    there,
                    memory.head_bytes,
                    here,
                    memory.head_bytes,
                    length * memory.entry_bytes,
                    memory.kv_heads,
                )


@dataclass(frozen=True, slots=True)
class Shape:
    """What distinguishes one captured step from another: the engine's range, the cache rows and the sizes."""

    range: int
    memory: int
    first: int
    rows: int
    slots: int
    outputs: int


@dataclass(slots=True)
class Step:
    """An execution context bound to one Shape. `graph` replays it; None until it was captured, or for ever if
    that is refused.
    """

    context: Any
    shape: Shape
    runs: int = 0
    graph: Any = None
    is_refused: bool = False


class TrtBackend:
    """An engine variant on a GPU. KV memory, input and output buffers are allocated once; a step copies ids
    in and ids out.
    """

    def __init__(self, engine: LoadedEngine, variant: Variant, model: ModelInfo, device: Device) -> None:
        assert variant.engine is not None
        assert variant.capacity is not None
        self._engine, self._device, self._info = engine, device, variant.engine
        self.outputs = variant.outputs
        self._model, self._capacity = model, variant.capacity
        self._in_place = variant.kv_layout == "static"
        # A step of an engine without symbols is filled up with rows and slots that nobody asked for. What
        # they write goes to the last `slots` entries of a row, which no cursor reaches. Elsewhere the rows of
        # a batch share the widest row's slots, so that a row near its end writes on.
        self._exact = (self._info.max_rows, self._info.max_slots) if variant.is_static else None
        widest = max((r.slots.max for r in self._info.ranges if r.name == "decode"), default=1)
        spare = self._info.max_slots if variant.is_static else widest - 1 if self._info.max_rows > 1 else 0
        self.max_slots: int | None = self._info.max_slots
        self.max_capacity = min(model.context_length, self._capacity - spare)
        self._item = ITEM_SIZES[variant.kv_dtype]
        self._suffixes = [f"{i}.{kind}" for i in range(model.num_layers) for kind in ("key", "value")]
        self._lock = threading.RLock()
        self._free: list[KvMemory] = []
        self._decode: OrderedDict[Shape, Step] = OrderedDict()
        self._prefill: dict[int, Step] = {}
        rows, slots, outputs = self._info.max_rows, self._info.max_slots, self._info.max_outputs
        sizes = {
            "input_ids": rows * slots * 8,
            "kv_length": rows * 8,
            "output_index": rows * outputs * 8,
            "token_ids": rows * outputs * 8,
        }
        sizes |= {name: rows * outputs * 4 for name in self.outputs if name not in ("token_ids", "logits")}
        if "logits" in self.outputs:
            sizes["logits"] = rows * outputs * model.vocab_size * 4
        new_entries = rows * slots * model.num_kv_heads * model.head_dim * self._item
        sizes |= {} if self._in_place else {f"present.{s}": new_entries for s in self._suffixes}
        self._buffers = {name: device.allocate(size) for name, size in sizes.items()}
        self._scratch = device.allocate(engine.scratch_bytes)
        weakref.finalize(self, device.close)

    @classmethod
    def of(cls, bundle: Bundle, variant: Variant) -> TrtBackend:
        """Load an engine of a bundle. Raises SessionError that names what it was built for and what is here."""
        from .cuda import Device

        device = Device()
        return cls(LoadedEngine.of(bundle, variant, device), variant, bundle.manifest.model, device)

    @property
    def num_graphs(self) -> int:
        """Steps that are replayed as CUDA graphs."""
        return sum(step.graph is not None for step in self._decode.values())

    def new_cache(self, num_rows: int) -> TrtCache:
        if num_rows > self._info.max_rows:
            raise SessionError(
                f"{num_rows} rows, but this engine was built for at most {self._info.max_rows}; build it"
                f" again with --batch {num_rows}"
            )
        with self._lock:
            memory = self._free.pop() if self._free else self._allocate()
            # What an earlier request left may be infinite, and 0 * infinity is NaN.
            for address in memory.addresses:
                self._device.zero(address, memory.tensor_bytes)
        cache = TrtCache(self._device, self._lock, memory)
        weakref.finalize(cache, self._free.append, memory)
        return cache

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
        rows, count = output_index.shape
        if self._exact is not None:
            input_ids, kv_length, output_index = self._filled_up(input_ids, kv_length, output_index)
        with self._lock:
            step = self._step(cache.memory, first, len(input_ids), input_ids.shape[1], output_index.shape[1])
            # Held until the stream is synchronized: the copies read them later.
            fed = [np.ascontiguousarray(array, np.int64) for array in (input_ids, kv_length, output_index)]
            for name, array in zip(INPUTS, fed, strict=True):
                self._device.upload(self._buffers[name], array)
            self._run(step)
            if not self._in_place:
                self._place(cache.memory, first, kv_length, input_ids.shape[1])
            results = {
                n: self._fetch(n, output_index.shape) for n in self.outputs if n != "logits" or want_logits
            }
            self._device.synchronize()
            if step.runs == 1:
                self._engine.keep_kernels()
        return StepOutput(**{name: array[:rows, :count] for name, array in results.items()})

    def _filled_up(
        self, input_ids: np.ndarray, kv_length: np.ndarray, output_index: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        assert self._exact is not None
        rows, slots = self._exact
        ids, lengths, index = (
            np.zeros((rows, slots), np.int64),
            np.full(rows, self._capacity - slots),
            np.zeros((rows, slots), np.int64),
        )
        if input_ids.shape[0] > rows or input_ids.shape[1] > slots:
            raise SessionError(
                f"a step of {input_ids.shape[0]} x {input_ids.shape[1]} slots; this engine is for exactly"
                f" {rows} x {slots}"
            )
        ids[: input_ids.shape[0], : input_ids.shape[1]] = input_ids
        lengths[: len(kv_length)] = kv_length
        index[: output_index.shape[0], : output_index.shape[1]] = output_index
        return ids, lengths, index

    def _step(self, memory: KvMemory, first: int, rows: int, slots: int, outputs: int) -> Step:
        """The bound context for this shape. Decode steps keep one each, because a captured graph belongs to
        its context.
        """
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
        shape = Shape(at, memory.addresses[0], first, rows, slots, outputs)
        if self._info.ranges[at].name != "decode":
            step = self._prefill.get(at) or Step(self._new_context(at), shape)
            self._prefill[at] = step
            if step.runs == 0 or step.shape != shape:
                step.shape, step.runs = shape, 0
                self._bind(step, memory)
            return step
        if shape in self._decode:
            self._decode.move_to_end(shape)
            return self._decode[shape]
        while len(self._decode) >= MOST_GRAPHS:
            _, oldest = self._decode.popitem(last=False)
            if oldest.graph is not None:
                self._device.forget(oldest.graph)
        step = Step(self._new_context(at), shape)
        self._bind(step, memory)
        self._decode[shape] = step
        return step

    def _new_context(self, at: int) -> Any:
        return self._engine.new_context(at, self._scratch, self._device.stream)

    def _bind(self, step: Step, memory: KvMemory) -> None:
        """Give the context its shapes and addresses; past and present of a KV tensor are one address."""
        shape, context = step.shape, step.context
        kv = (shape.rows, memory.kv_heads, memory.capacity, self._model.head_dim)
        shapes = {
            "input_ids": (shape.rows, shape.slots),
            "kv_length": (shape.rows,),
            "output_index": (shape.rows, shape.outputs),
        }
        shapes |= {f"past_key_values.{suffix}": kv for suffix in self._suffixes}
        addresses = dict(self._buffers)
        for suffix, address in zip(self._suffixes, memory.addresses, strict=True):
            here = address + shape.first * memory.row_bytes
            addresses[f"past_key_values.{suffix}"] = here
            if self._in_place:
                addresses[f"present.{suffix}"] = here
        refused = [name for name, size in shapes.items() if not context.set_input_shape(name, size)]
        refused += [
            name for name, address in addresses.items() if not context.set_tensor_address(name, address)
        ]
        if refused:
            raise SessionError(
                f"the engine and the manifest disagree about {', '.join(refused[:6])}; build the engine again"
            )

    def _run(self, step: Step) -> None:
        is_decode = step.shape in self._decode
        # TensorRT finishes its preparations in the first run of a context, which therefore cannot be
        # captured.
        if is_decode and step.graph is None and step.runs > 0 and not step.is_refused:
            step.graph = self._device.capture(
                lambda: bool(step.context.execute_async_v3(self._device.stream))
            )
            step.is_refused = step.graph is None
        if step.graph is not None:
            self._device.launch(step.graph)
        elif not step.context.execute_async_v3(self._device.stream):
            raise SessionError(
                f"TensorRT failed in a step of {step.shape.rows} x {step.shape.slots} slots:"
                f" {self._engine.last_error()}"
            )
        step.runs += 1

    def _place(self, memory: KvMemory, first: int, kv_length: np.ndarray, slots: int) -> None:
        """Copy a `delta` engine's new entries behind each row's cursor."""
        run = slots * memory.entry_bytes
        for suffix, address in zip(self._suffixes, memory.addresses, strict=True):
            new = self._buffers[f"present.{suffix}"]
            for i, length in enumerate(kv_length.tolist()):
                target = address + (first + i) * memory.row_bytes + length * memory.entry_bytes
                self._device.copy_rows(
                    target, memory.head_bytes, new + i * memory.kv_heads * run, run, run, memory.kv_heads
                )

    def _fetch(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        array = np.empty(
            (*shape, self._model.vocab_size) if name == "logits" else shape,
            np.int64 if name == "token_ids" else np.float32,
        )
        self._device.download(array, self._buffers[name])
        return array

    def _allocate(self) -> KvMemory:
        """KV memory for as many rows as the engine takes, so that any request can use it again."""
        rows = self._info.max_rows + (self._info.max_rows - 1 if self._exact is not None else 0)
        entry = self._model.head_dim * self._item
        head = self._capacity * entry
        row = self._model.num_kv_heads * head
        addresses = tuple(self._device.allocate(rows * row) for _ in self._suffixes)
        return KvMemory(addresses, row, head, entry, rows, self._model.num_kv_heads, self._capacity)
