"""A GPU and a TensorRT engine made of numpy: addresses, strides, stream order and captured graphs are those
of the real ones.

The engine's KV entries are the tokens themselves, as in fake.py, so that a stale or misplaced entry shows in
what it predicts. It refuses what the real ones refuse or punish: memory that was never allocated or was given
back, a host array that is gone when the stream comes to it, whatever a capture does not allow, tensors
without shape or address or not aligned, aliases that no operator writes in place, a context that two threads
run at once, and any call after an error that stays.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from mars_export.runtime.bundle.engine_info import EngineInfo, Extent, Range
from mars_export.runtime.bundle.manifest import ModelInfo, Variant
from mars_export.runtime.errors import SessionError
from support.fake import Predict, _seen

MODEL = ModelInfo("llama", 1000, 8, 2, 2, 2, 4, 64)
KV_ITEM = 4
ALIGNMENT = 256
Work = Callable[[], None]


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
        self.left: int | None = None  # allocations before memory is out
        self.is_broken = False
        self.refuse_capture, self.recording = refuse_capture, None
        self.queue: list[Work] = []
        self.graphs = self.launches = self.forgotten = self.closed = 0

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

    def free(self, address: int) -> None:
        self._call("cudaFree", in_capture=False)
        self._flush()
        size = self.live.pop(address)
        self.memory[address : address + size] = 0xFF

    def close(self) -> None:
        self.closed += 1

    def zero(self, address: int, num_bytes: int) -> None:
        self._call("cudaMemsetAsync", in_capture=False)
        self.queue.append(lambda: self._bytes(address, num_bytes).fill(0))

    def upload(self, address: int, array: np.ndarray) -> None:
        self._call("cudaMemcpyAsync", in_capture=False)
        assert array.flags.c_contiguous
        held = weakref.ref(array)

        def copy() -> None:
            host = held()
            assert host is not None, "a host array is gone before the stream has read it"
            self.events.append(("upload", host.nbytes))
            self._bytes(address, host.nbytes)[:] = host.reshape(-1).view(np.uint8)

        self.queue.append(copy)

    def download(self, array: np.ndarray, address: int) -> None:
        self._call("cudaMemcpyAsync", in_capture=False)
        held = weakref.ref(array)

        def copy() -> None:
            host = held()
            assert host is not None, "a host array is gone before the stream has written it"
            self.events.append(("download", host.nbytes))
            host.reshape(-1).view(np.uint8)[:] = self._bytes(address, host.nbytes)

        self.queue.append(copy)

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int
    ) -> None:
        self._call("cudaMemcpy2DAsync", in_capture=False)
        assert width <= target_pitch or height == 1, "cudaErrorInvalidPitchValue"
        assert width <= source_pitch or height == 1, "cudaErrorInvalidPitchValue"

        def copy() -> None:
            self.events.append(("copy", width * height))
            for i in range(height):
                there, here = target + i * target_pitch, source + i * source_pitch
                self._bytes(there, width)[:] = self._bytes(here, width)

        self.queue.append(copy)

    def synchronize(self) -> None:
        self._call("cudaStreamSynchronize", in_capture=False)
        self._flush()
        self.events.append(("synchronize", 0))

    def capture(self, enqueue: Callable[[], bool]) -> Any | None:
        self._call("cudaStreamBeginCapture", in_capture=False)
        self.recording = []
        try:
            done = enqueue()
        finally:
            recorded, self.recording = self.recording, None
        if self.refuse_capture or not done:
            return None
        self.graphs += 1
        return recorded

    def launch(self, graph: list[Work]) -> None:
        self._call("cudaGraphLaunch", in_capture=False)
        self.launches += 1
        self.queue += graph

    def forget(self, _: Any) -> None:
        self.forgotten += 1

    def enqueue(self, work: Work) -> None:
        (self.queue if self.recording is None else self.recording).append(work)

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

    def _call(self, name: str, *, in_capture: bool) -> None:
        if self.is_broken:
            raise SessionError(f"CUDA: {name} failed: an illegal memory access was encountered")
        if self.recording is not None and not in_capture:
            raise SessionError(f"CUDA: {name} failed: operation not permitted when stream is capturing")


class FakeContext:
    """An execution context. `error` says why the last call was refused."""

    def __init__(self, engine: FakeEngine, range_index: int) -> None:
        self.engine, self.range_index = engine, range_index
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.is_prepared = False
        self._running = threading.Lock()

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        r = self.engine.info.ranges[self.range_index]
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
        self.is_prepared &= self.shapes.get(name) == tuple(shape)
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return name in self.engine.tensors

    def execute_async_v3(self, stream: int) -> bool:
        device = self.engine.device
        assert stream == device.stream
        assert self._running.acquire(blocking=False), "a context runs in one thread at a time"
        try:
            self.engine.error = self._refusal()
            if self.engine.error is not None:
                return False
            self.is_prepared = True
            bound = dict(self.addresses), dict(self.shapes)
            device.enqueue(lambda: self._execute(*bound))
            return True
        finally:
            self._running.release()

    def _refusal(self) -> str | None:
        engine = self.engine
        if engine.fails:
            return "the fake was told to fail"
        if engine.device.recording is not None and not self.is_prepared:
            return "the first run after a change of shapes cannot be captured"
        missing = [name for name in engine.inputs if name not in self.shapes]
        missing += [name for name in engine.tensors if not self.addresses.get(name)]
        if missing:
            return f"no shape or address: {missing}"
        odd = [name for name, address in self.addresses.items() if address % ALIGNMENT]
        if odd:
            return f"not aligned: {odd}"
        for past in engine.pasts:
            present = past.replace("past_key_values", "present")
            if (self.addresses[past] == self.addresses[present]) != engine.in_place:
                return f"{present} is {'not ' if engine.in_place else ''}{past}"
        return None

    def _execute(self, addresses: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        engine, device = self.engine, self.engine.device
        device.events.append(("execute", 0))
        ids, lengths, index = (
            device.array(addresses[n], shapes[n], np.int64)
            for n in ("input_ids", "kv_length", "output_index")
        )
        rows, slots = ids.shape
        token_ids = device.array(addresses["token_ids"], index.shape, np.int64)
        confidence = device.array(addresses["confidence"], index.shape, np.float32)
        for suffix in (f"{i}.{kind}" for i in range(MODEL.num_layers) for kind in ("key", "value")):
            past = device.array(
                addresses[f"past_key_values.{suffix}"], shapes[f"past_key_values.{suffix}"], np.float32
            )
            if engine.in_place:
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
                    token_ids[row, j], confidence[row, j] = engine.answer(known)


class FakeEngine:
    """What LoadedEngine offers. `contexts` are all that were made."""

    scratch_bytes = 512

    def __init__(self, device: FakeDevice, info: EngineInfo, predict: Predict, in_place: bool = True) -> None:
        self.device, self.info, self.predict, self.in_place = device, info, predict, in_place
        self.contexts: list[FakeContext] = []
        self.fails, self.error = False, None
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
        ]

    def new_context(self, range_index: int, scratch: int, stream: int) -> FakeContext:
        assert self.device.live.get(scratch, 0) >= self.scratch_bytes
        assert stream == self.device.stream
        self.contexts.append(FakeContext(self, range_index))
        return self.contexts[-1]

    def answer(self, known: list[int]) -> tuple[int, float]:
        try:
            return self.predict(*_seen(known))
        except AssertionError:
            if any(t != 0 for t in known[-1:]):
                raise
            return 0, 0.0  # a slot that fills a fixed window up

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
    info: EngineInfo, capacity: int, kv_layout: str = "static", *, fixed: bool = False
) -> Variant:
    shape = (info.max_rows, info.max_slots) if fixed else (None, None)
    outputs = ("token_ids", "confidence")
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
