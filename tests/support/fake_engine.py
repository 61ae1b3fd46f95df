"""A TensorRT engine made of numpy, on the GPU of fake_cuda.py.

Its KV entries are the tokens themselves, as in fake.py, so that a stale or misplaced entry shows in what it
predicts. It refuses what the real one refuses or punishes; stub.hpp has the rules.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np

from mars_export.runtime.bundle.manifest import ModelInfo, Variant
from mars_export.runtime.bundle.variant_info import EngineInfo, Extent, ShapeRange
from support.fake import Predict, _seen
from support.fake_cuda import ALIGNMENT, Bound, FakeDevice

MODEL = ModelInfo("llama", 1000, 8, 2, 2, 2, 4, 64)


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
        self.ties = 0  # of the likeliest tokens so many are equally likely, the highest id first
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
                        if self.ties:
                            ids_[row, j, : self.ties] = ids_[row, j, : self.ties][::-1]
                            logs[row, j, : self.ties] = logs[row, j, 0]
                            token_ids[row, j] = ids_[row, j, 0]

    def answer(self, known: list[int]) -> tuple[int, float]:
        try:
            return self.predict(*_seen(known))
        except AssertionError:
            if any(t != 0 for t in known[-1:]):
                raise
            return 0, 0.0  # a slot that fills a fixed number of masks up

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
    ranges: tuple[ShapeRange, ...] = (
        ShapeRange("decode", Extent(1, batch, batch), Extent(1, block, widest), predictions),
        ShapeRange("prefill", Extent(1, 1, batch), Extent(1, prefill, prefill), predictions),
    )
    if fixed:
        ranges = (ShapeRange("decode", Extent(batch, batch, batch), exact, exact),)
    return EngineInfo(
        "1.7.1.116", "12", "linux-x86_64", ("sm86", "sm89"), ranges, "rtx.onnx", "0" * 64, 1.0, 1
    )


def engine_variant(
    info: EngineInfo, capacity: int, kv_layout: str = "in-place", *, fixed: bool = False, top_k: bool = False
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
