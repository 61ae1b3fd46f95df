"""A GPU and a TensorRT engine made of numpy: addresses, strides, stream order and captured graphs are those of the real ones.

The engine's KV entries are the tokens themselves, as in fake.py, so that a stale or misplaced entry shows in what it predicts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mars_export.runtime.bundle.engine_info import EngineInfo, Extent, Range
from mars_export.runtime.bundle.manifest import ModelInfo, Variant
from support.fake import Predict, _seen

MODEL = ModelInfo("llama", 1000, 8, 2, 2, 2, 4, 64)
KV_ITEM = 4
DTYPES = {"input_ids": np.int64, "kv_length": np.int64, "output_index": np.int64, "token_ids": np.int64}


class FakeDevice:
    """One arena of bytes, whose offsets are the addresses; work on the stream is done at once, except while it is captured."""

    def __init__(self, size: int = 1 << 20, refuse_capture: bool = False) -> None:
        self.memory = np.full(
            size, 0xFF, np.uint8
        )  # NaN and -1 everywhere: nothing may be read before it is written
        self.next, self.stream = 4096, 77
        self.events: list[tuple[str, int]] = []
        self.allocations: list[int] = []
        self.refuse_capture, self.recording = refuse_capture, None
        self.graphs = self.launches = self.forgotten = self.closed = 0

    def allocate(self, num_bytes: int) -> int:
        address, self.next = self.next, self.next + -(-max(num_bytes, 256) // 256) * 256
        assert self.next <= len(self.memory), "the arena is full"
        self.allocations.append(num_bytes)
        self.zero(address, max(num_bytes, 256))
        return address

    def close(self) -> None:
        self.closed += 1

    def zero(self, address: int, num_bytes: int) -> None:
        self.memory[address : address + num_bytes] = 0

    def upload(self, address: int, array: np.ndarray) -> None:
        assert array.flags.c_contiguous
        self.events.append(("upload", array.nbytes))
        self.memory[address : address + array.nbytes] = array.reshape(-1).view(np.uint8)

    def download(self, array: np.ndarray, address: int) -> None:
        self.events.append(("download", array.nbytes))
        array.reshape(-1).view(np.uint8)[:] = self.memory[address : address + array.nbytes]

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int
    ) -> None:
        self.events.append(("copy", width * height))
        for i in range(height):
            there, here = target + i * target_pitch, source + i * source_pitch
            self.memory[there : there + width] = self.memory[here : here + width]

    def synchronize(self) -> None:
        self.events.append(("synchronize", 0))

    def capture(self, enqueue: Callable[[], bool]) -> Any | None:
        self.recording = []
        done = enqueue()
        recorded, self.recording = self.recording, None
        if self.refuse_capture or not done:
            return None
        self.graphs += 1
        return recorded

    def launch(self, graph: list[Callable[[], None]]) -> None:
        self.launches += 1
        for work in graph:
            work()

    def forget(self, _: Any) -> None:
        self.forgotten += 1

    def enqueue(self, work: Callable[[], None]) -> None:
        if self.recording is not None:
            self.recording.append(work)
        else:
            work()

    def view(self, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.memory[address : address + count].view(dtype).reshape(shape)


class FakeContext:
    def __init__(self, engine: FakeEngine, range_index: int) -> None:
        self.engine, self.range_index = engine, range_index
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        r = self.engine.info.ranges[self.range_index]
        good = {
            "input_ids": (r.batch, r.slots),
            "kv_length": (r.batch,),
            "output_index": (r.batch, r.outputs),
        }.get(name)
        if good is not None and not all(extent.holds(size) for extent, size in zip(good, shape, strict=True)):
            return False
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        device = self.engine.device
        assert stream == device.stream
        if self.engine.fails:
            return False
        bound = dict(self.addresses), dict(self.shapes)
        device.enqueue(lambda: self._execute(*bound))
        return True

    def _execute(self, addresses: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        engine, device = self.engine, self.engine.device
        device.events.append(("execute", 0))
        ids, lengths, index = (
            device.view(addresses[n], shapes[n], np.int64) for n in ("input_ids", "kv_length", "output_index")
        )
        rows, slots = ids.shape
        token_ids = device.view(addresses["token_ids"], index.shape, np.int64)
        confidence = device.view(addresses["confidence"], index.shape, np.float32)
        for suffix in (f"{i}.{kind}" for i in range(MODEL.num_layers) for kind in ("key", "value")):
            past = device.view(
                addresses[f"past_key_values.{suffix}"], shapes[f"past_key_values.{suffix}"], np.float32
            )
            if engine.in_place:
                assert addresses[f"present.{suffix}"] == addresses[f"past_key_values.{suffix}"], (
                    "written in place"
                )
                for row in range(rows):
                    past[row, :, lengths[row] : lengths[row] + slots] = ids[row][:, None]
            else:
                new = device.view(
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
        self.fails = False
        self.kept = 0

    def new_context(self, range_index: int, scratch: int, stream: int) -> FakeContext:
        assert scratch
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
        return "the fake was told to fail"

    def keep_kernels(self) -> None:
        self.kept += 1


def engine_info(batch: int, block: int, prefill: int, *, static: bool = False) -> EngineInfo:
    exact = Extent(block, block, block)
    decode = Range(
        "decode", Extent(1, batch, batch), Extent(1, block, 2 * block - 1), Extent(1, block, block)
    )
    ranges: tuple[Range, ...] = (
        decode,
        Range("prefill", Extent(1, 1, batch), Extent(1, prefill, prefill), Extent(1, block, block)),
    )
    if static:
        ranges = (Range("decode", Extent(batch, batch, batch), exact, exact),)
    return EngineInfo(
        "1.7.1.116", "12", "linux-x86_64", ("sm86", "sm89"), ranges, "rtx.onnx", "0" * 64, 1.0, 1
    )


def engine_variant(
    info: EngineInfo, capacity: int, kv_layout: str = "static", *, static: bool = False
) -> Variant:
    shape = (info.max_rows, info.max_slots) if static else (None, None)
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
