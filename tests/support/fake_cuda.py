"""A GPU and a TensorRT engine made of numpy: addresses, strides, stream order and captured graphs are those
of the real ones.

The engine's KV entries are the tokens themselves, as in fake.py, so that a stale or misplaced entry shows in
what it predicts. It refuses what the real ones refuse or punish; docs/tensorrt.md has the list.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from mars_export.runtime.bundle.engine_info import EngineInfo, Extent, Range
from mars_export.runtime.bundle.manifest import ModelInfo, Variant
from mars_export.runtime.device.cuda import Runs, Turn
from mars_export.runtime.errors import DeviceLost, SessionError
from support.fake import Predict, _seen

MODEL = ModelInfo("llama", 1000, 8, 2, 2, 2, 4, 64)
KV_ITEM = 4
ALIGNMENT = 256
Work = Callable[[], None]


@dataclass(slots=True)
class Graph:
    """A captured step: what it does, and what each context was bound to when it was captured."""

    work: list[Work] = field(default_factory=list)
    bound: list[tuple[Bound, int]] = field(default_factory=list)


@dataclass(slots=True)
class Bound:
    """What a context is bound to; `changes` counts the times that it was bound to something else."""

    range_index: int
    scratch: int
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)
    changes: int = 0
    is_alive: bool = True

    def end(self) -> None:
        self.is_alive = False


class FakeDevice:
    """One arena of bytes, whose offsets are the addresses, and one stream: what is put on it is done at
    `synchronize`.
    """

    def __init__(self, size: int = 1 << 20, refuse_capture: bool = False) -> None:
        # NaN and -1 everywhere: nothing may be read before it is written
        self.memory = np.full(size, 0xFF, np.uint8)
        self.next, self.stream = 4096, 77
        self.events: list[tuple[str, int]] = []
        self.allocations: list[int] = []
        self.live: dict[int, int] = {}
        self.spare: list[int] = []  # addresses that were given back and are handed out again
        self.locked: list[np.ndarray] = []  # page-locked memory, which lives as long as the device
        self.left: int | None = None  # allocations before memory is out
        self.is_broken = False
        self.refuse_capture = refuse_capture
        self.recording: Graph | None = None
        self.queue: list[Work] = []
        self.graphs = self.launches = self.forgotten = self.closed = 0
        self.current = threading.local()  # which GPU is a thread's own affair
        good = SimpleNamespace(cudaSuccess=0)
        self.turn = Turn(
            SimpleNamespace(
                cudaError_t=good,
                cudaGetDevice=lambda: (0, getattr(self.current, "ordinal", 0)),
                cudaSetDevice=self._set_device,
            )
        )

    def allocate(self, num_bytes: int) -> int:
        self._call("cudaMalloc", in_capture=False)
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise SessionError("CUDA: cudaMalloc failed: out of memory (cudaErrorMemoryAllocation)")
        size = -(-max(num_bytes, 256) // ALIGNMENT) * ALIGNMENT
        if self.spare:
            address = self.spare.pop(0)
        else:
            address, self.next = self.next, self.next + size
        assert self.next <= len(self.memory), "the arena is full"
        self.allocations.append(num_bytes)
        self.live[address] = max(num_bytes, 256)
        self.zero(address, max(num_bytes, 256))
        return address

    def pinned(self, num_bytes: int) -> np.ndarray:
        self._call("cudaHostAlloc", in_capture=False)
        self.locked.append(np.full(num_bytes, 0xFF, np.uint8))
        return self.locked[-1]

    def free(self, address: int) -> None:
        self._call("cudaFree", in_capture=False)
        self._flush()
        size = self.live.pop(address)
        self.memory[address : address + size] = 0xFF

    def close(self) -> None:
        assert self.is_broken or self.forgotten == self.graphs, (
            "graphs go before their contexts, and both before their memory"
        )
        self.closed += 1

    def zero(self, address: int, num_bytes: int) -> None:
        self._call("cudaMemsetAsync", in_capture=False)
        self.queue.append(lambda: self._bytes(address, num_bytes).fill(0))

    def upload(self, address: int, array: np.ndarray) -> None:
        self._call("cudaMemcpyAsync", in_capture=False)
        assert array.flags.c_contiguous
        held = self._held(array)

        def copy() -> None:
            host = held()
            assert host is not None, "a host array is gone before the stream has read it"
            self.events.append(("upload", host.nbytes))
            self._bytes(address, host.nbytes)[:] = host.reshape(-1).view(np.uint8)

        self.queue.append(copy)

    def download(self, array: np.ndarray, address: int) -> None:
        self._call("cudaMemcpyAsync", in_capture=False)
        held = self._held(array)

        def copy() -> None:
            host = held()
            assert host is not None, "a host array is gone before the stream has written it"
            self.events.append(("download", host.nbytes))
            host.reshape(-1).view(np.uint8)[:] = self._bytes(address, host.nbytes)

        self.queue.append(copy)

    def copy_runs(self, target: Runs, source: Runs, width: int, height: int, depth: int) -> None:
        self._call("cudaMemcpy3DAsync", in_capture=False)
        for runs in (target, source):
            assert width <= runs.pitch, "cudaErrorInvalidPitchValue"
            assert height <= runs.per_slice, "cudaErrorInvalidValue: slices overlap"

        def at(runs: Runs, y: int, z: int) -> np.ndarray:
            return self._bytes(runs.address + (z * runs.per_slice + y) * runs.pitch, width)

        def copy() -> None:
            self.events.append(("copy", width * height * depth))
            places = [(y, z) for z in range(depth) for y in range(height)]
            read = [at(source, *place).copy() for place in places]
            for place in places:
                at(target, *place)[:] = 0xEE
            assert all((at(source, *p) == r).all() for p, r in zip(places, read, strict=True)), "an overlap"
            for place, run in zip(places, read, strict=True):
                at(target, *place)[:] = run

        self.queue.append(copy)

    def _held(self, array: np.ndarray) -> Callable[[], np.ndarray | None]:
        """What the stream will find of a host array: memory of ours stays, whoever looks at it goes."""
        is_ours = any(array is one or array.base is one for one in self.locked)
        return (lambda: array) if is_ours else weakref.ref(array)

    def synchronize(self) -> None:
        self._call("cudaStreamSynchronize", in_capture=False)
        self._flush()
        self.events.append(("synchronize", 0))

    def capture(self, enqueue: Callable[[], bool]) -> Any | None:
        self._call("cudaStreamBeginCapture", in_capture=False)
        self.recording = Graph()
        try:
            done = enqueue()
        finally:
            recorded, self.recording = self.recording, None
        if self.refuse_capture or not done:
            return None
        self.graphs += 1
        return recorded

    def launch(self, graph: Graph) -> None:
        self._call("cudaGraphLaunch", in_capture=False)
        for bound, changes in graph.bound:
            assert bound.is_alive, "a graph is launched after its context is gone"
            assert bound.changes == changes, (
                "a graph is launched after its context was bound to something else"
            )
        self.launches += 1
        self.queue += graph.work

    def forget(self, graph: Graph) -> None:
        self._call("cudaGraphExecDestroy", in_capture=False)
        assert all(bound.is_alive for bound, _ in graph.bound), "a context is gone before its graph"
        self.forgotten += 1

    def enqueue(self, work: Work, bound: Bound) -> None:
        self._call("cudaLaunchKernel", in_capture=True)
        if self.recording is None:
            self.queue.append(work)
        else:
            self.recording.work.append(work)
            self.recording.bound.append((bound, bound.changes))

    def view(self, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """What is there when the stream has come to its end."""
        self._flush()
        return self.array(address, shape, dtype)

    def array(self, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._bytes(address, count).view(dtype).reshape(shape)

    def _flush(self) -> None:
        queue, self.queue = self.queue, []
        for work in queue:
            work()

    def _bytes(self, address: int, count: int) -> np.ndarray:
        inside = any(
            start <= address and address + count <= start + size for start, size in self.live.items()
        )
        assert inside, f"{count} bytes at {address}: not of one allocation"
        return self.memory[address : address + count]

    def _set_device(self, ordinal: int) -> tuple[int]:
        self.current.ordinal = ordinal
        return (0,)

    def _call(self, name: str, *, in_capture: bool) -> None:
        assert getattr(self.current, "ordinal", 0) == 0, f"{name}: another GPU is the current one"
        if self.is_broken:
            raise DeviceLost(
                f"CUDA: {name} failed: an illegal memory access was encountered (cudaErrorIllegalAddress);"
                " nothing computes on the GPU in this process any more: start it again"
            )
        if self.recording is not None and not in_capture:
            raise SessionError(f"CUDA: {name} failed: operation not permitted when stream is capturing")


class FakeContext:
    """An execution context. `engine.error` says why the last call was refused."""

    def __init__(self, engine: FakeEngine, bound: Bound) -> None:
        self.engine, self.bound = engine, bound
        self.is_prepared = False
        self._running = threading.Lock()
        weakref.finalize(self, bound.end).atexit = False

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        r = self.engine.info.ranges[self.bound.range_index]
        kv = (r.batch, *(Extent(n, n, n) for n in (MODEL.num_kv_heads, self.engine.capacity, MODEL.head_dim)))
        extents = {
            "input_ids": (r.batch, r.slots),
            "kv_length": (r.batch,),
            "output_index": (r.batch, r.outputs),
        }
        good = kv if name in self.engine.pasts else extents.get(name)
        if good is None or len(good) != len(shape):
            return False
        if not all(extent.holds(size) for extent, size in zip(good, shape, strict=True)):
            return False
        if self.bound.shapes.get(name) != tuple(shape):
            self.is_prepared = False
            self.bound.changes += 1
            self.bound.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.bound.changes += self.bound.addresses.get(name) != address
        self.bound.addresses[name] = address
        return name in self.engine.tensors

    def execute_async_v3(self, stream: int) -> bool:
        device = self.engine.device
        assert (type(stream), stream) == (int, device.stream), "the stream that the profile was chosen on"
        assert self._running.acquire(blocking=False), "a context runs in one thread at a time"
        try:
            self.engine.error = self._refusal()
            if self.engine.error is not None:
                return False
            self.is_prepared = True
            bound, engine = self.bound, self.engine
            now = dict(bound.addresses), dict(bound.shapes)

            def work() -> None:
                assert bound.is_alive, "a context is gone before the stream has come to its step"
                size = device.live.get(bound.scratch, 0)
                assert size >= FakeEngine.scratch_bytes, "the shared scratch memory is gone"
                engine.execute(*now)

            device.enqueue(work, bound)
            return True
        finally:
            self._running.release()

    def _refusal(self) -> str | None:
        engine = self.engine
        if engine.breaks:
            engine.device.is_broken = True
            return "Cuda Runtime (an illegal memory access was encountered)"
        if engine.fails:
            return "the fake was told to fail"
        if engine.device.recording is not None and engine.allocates:
            engine.device._call("cudaMalloc", in_capture=False)
        if engine.device.recording is not None and not self.is_prepared:
            return "the first run after a change of shapes cannot be captured"
        shapes, addresses = self.bound.shapes, self.bound.addresses
        missing = [name for name in engine.inputs if name not in shapes]
        missing += [name for name in engine.tensors if not addresses.get(name)]
        if missing:
            return f"no shape or address: {missing}"
        odd = [name for name, address in addresses.items() if address % ALIGNMENT]
        if odd:
            return f"not aligned: {odd}"
        for past in engine.pasts:
            present = past.replace("past_key_values", "present")
            if (addresses[past] == addresses[present]) != engine.in_place:
                return f"{present} is {'not ' if engine.in_place else ''}{past}"
        return None


class FakeEngine:
    """What LoadedEngine offers. `contexts`: what all that were ever made are bound to; `top_k` 0: no such
    outputs. Its likeliest tokens are those that follow the answer."""

    scratch_bytes = 512

    def __init__(
        self, device: FakeDevice, info: EngineInfo, predict: Predict, in_place: bool = True, top_k: int = 0
    ) -> None:
        self.device, self.info, self.predict, self.in_place = device, info, predict, in_place
        self.top_k = top_k
        self.contexts: list[Bound] = []
        self.fails, self.error = False, None
        self.breaks = False  # the next step breaks the device
        self.allocates = False  # in a step, which can then not be captured
        self.kept = 0
        self.capacity = 64
        suffixes = [f"{i}.{kind}" for i in range(MODEL.num_layers) for kind in ("key", "value")]
        self.pasts = [f"past_key_values.{suffix}" for suffix in suffixes]
        self.inputs = ["input_ids", "kv_length", "output_index", *self.pasts]
        self.tensors = [
            *self.inputs,
            "token_ids",
            "confidence",
            *(f"present.{suffix}" for suffix in suffixes),
            *(("topk_ids", "topk_logprobs") if top_k else ()),
        ]

    def width(self, name: str) -> int:
        assert name in self.tensors
        return self.top_k

    def new_context(self, range_index: int, scratch: int, stream: int) -> FakeContext:
        assert self.device.live.get(scratch, 0) >= self.scratch_bytes
        assert stream == self.device.stream
        self.contexts.append(Bound(range_index, scratch))
        return FakeContext(self, self.contexts[-1])

    def execute(self, addresses: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        device = self.device
        device.events.append(("execute", 0))
        ids, lengths, index = (
            device.array(addresses[n], shapes[n], np.int64)
            for n in ("input_ids", "kv_length", "output_index")
        )
        rows, slots = ids.shape
        assert ((index >= 0) & (index < slots)).all(), "a prediction beyond the window"
        assert not self.in_place or (lengths + slots <= self.capacity).all(), "an update beyond the cache"
        token_ids = device.array(addresses["token_ids"], index.shape, np.int64)
        confidence = device.array(addresses["confidence"], index.shape, np.float32)
        for suffix in (f"{i}.{kind}" for i in range(MODEL.num_layers) for kind in ("key", "value")):
            past = device.array(
                addresses[f"past_key_values.{suffix}"], shapes[f"past_key_values.{suffix}"], np.float32
            )
            if self.in_place:
                for row in range(rows):
                    past[row, :, lengths[row] : lengths[row] + slots] = ids[row][:, None]
            else:
                new = device.array(
                    addresses[f"present.{suffix}"],
                    (rows, MODEL.num_kv_heads, slots, MODEL.head_dim),
                    np.float32,
                )
                new[:] = ids[:, None, :, None]
            seen = [
                past[row, 0, : lengths[row], 0].astype(int).tolist() + ids[row].tolist()
                for row in range(rows)
            ]
            for row in range(rows):
                assert (past[row, :, : lengths[row]] == past[row, :1, : lengths[row], :1]).all(), (
                    "all heads hold the same entries"
                )
                if lengths[row] == 0 and not ids[row].any():
                    continue  # a row that fills a fixed batch up
                for j, slot in enumerate(index[row].tolist()):
                    known = seen[row][: lengths[row] + slot + 1]
                    token_ids[row, j], confidence[row, j] = token, sure = self.answer(known)
                    if self.top_k:
                        wide = (rows, index.shape[1], self.top_k)
                        ids_, logs = (
                            device.array(addresses[name], wide, dtype)
                            for name, dtype in (("topk_ids", np.int64), ("topk_logprobs", np.float32))
                        )
                        ids_[row, j] = token + np.arange(self.top_k)
                        logs[row, j] = np.log(max(sure, 1e-6)) - np.arange(self.top_k)

    def answer(self, known: list[int]) -> tuple[int, float]:
        try:
            return self.predict(*_seen(known))
        except AssertionError:
            if any(t != 0 for t in known[-1:]):
                raise
            return 0, 0.0  # a slot that fills a fixed window up

    def is_capturable(self, context: FakeContext, stream: int) -> bool:
        return not self.allocates and context.engine is self and stream == self.device.stream

    def last_error(self) -> str:
        return str(self.error)

    def keep_kernels(self) -> None:
        self.kept += 1


def engine_info(
    batch: int, block: int, prefill: int, *, fixed: bool = False, outputs: int | None = None
) -> EngineInfo:
    """`outputs`: most predictions, those of exact mode unless told otherwise; older engines had `block`."""
    exact, widest = Extent(block, block, block), 2 * block - 1
    predictions = Extent(1, block, outputs or widest)
    ranges: tuple[Range, ...] = (
        Range("decode", Extent(1, batch, batch), Extent(1, block, widest), predictions),
        Range("prefill", Extent(1, 1, batch), Extent(1, prefill, prefill), predictions),
    )
    if fixed:
        ranges = (Range("decode", Extent(batch, batch, batch), exact, exact),)
    return EngineInfo(
        "1.7.1.116", "12", "linux-x86_64", ("sm86", "sm89"), ranges, "rtx.onnx", "0" * 64, 1.0, 1
    )


def engine_variant(
    info: EngineInfo, capacity: int, kv_layout: str = "static", *, fixed: bool = False, top_k: bool = False
) -> Variant:
    shape = (info.max_rows, info.max_slots) if fixed else (None, None)
    outputs: tuple[str, ...] = ("token_ids", "confidence")
    outputs += ("topk_ids", "topk_logprobs") if top_k else ()
    return Variant(
        "rtx",
        "tensorrt_rtx",
        "rtx.engine",
        None,
        "float32",
        "float32",
        kv_layout,
        outputs,
        *shape,
        capacity,
        engine=info,
    )
