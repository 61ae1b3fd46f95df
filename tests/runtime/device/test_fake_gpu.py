"""The fake GPU refuses what the real one does: each rule of docs/tensorrt.md is broken once, on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.fake_cuda import FakeDevice
from support.fake_engine import MODEL, FakeContext, FakeEngine, engine_info

from mars_export import SessionError
from mars_export.runtime.device.trt.cuda import Runs

ROWS, SLOTS, CAPACITY = 1, 2, 64
KV = (ROWS, MODEL.num_kv_heads, CAPACITY, MODEL.head_dim)


class Bench:
    """A bound context of a small engine, ready to run."""

    def __init__(self, in_place: bool = True) -> None:
        self.device = FakeDevice()
        self.engine = FakeEngine(self.device, engine_info(2, 4, 16), lambda *_: (1, 1.0), in_place)
        self.scratch = self.device.allocate(FakeEngine.scratch_bytes)
        self.context: FakeContext = self.engine.new_context(0, self.scratch, self.device.stream)
        self.shapes = {"input_ids": (ROWS, SLOTS), "kv_length": (ROWS,), "output_index": (ROWS, 1)}
        self.shapes |= dict.fromkeys(self.engine.pasts, KV)
        self.addresses = {name: self.device.allocate(4 * int(np.prod(KV))) for name in self.engine.tensors}
        if in_place:
            for past in self.engine.pasts:
                self.addresses[past.replace("past_key_values", "present")] = self.addresses[past]
        for name, shape in self.shapes.items():
            assert self.context.set_input_shape(name, shape)
        for name, address in self.addresses.items():
            assert self.context.set_tensor_address(name, address)
        self.device.synchronize()

    def run(self) -> bool:
        return self.context.execute_async_v3(self.device.stream)

    def refusal(self) -> str:
        assert not self.run()
        return self.engine.last_error()

    def captured(self) -> Any:
        assert self.run()
        graph = self.device.capture(self.run)
        assert graph is not None
        return graph


def test_what_is_right_runs_and_is_captured() -> None:
    bench = Bench()
    bench.device.launch(bench.captured())
    bench.device.synchronize()
    assert [kind for kind, _ in bench.device.events if kind == "execute"] == ["execute"] * 2


def test_a_step_without_every_shape_and_address_is_refused() -> None:
    for name in Bench().shapes:
        bench = Bench()
        del bench.context.bound.shapes[name]
        assert name in bench.refusal()
    for name in Bench().addresses:
        bench = Bench()
        bench.context.set_tensor_address(name, 0)
        assert name in bench.refusal()
        bench.context.set_tensor_address(name, bench.addresses[name] + 64)
        assert "not aligned" in bench.refusal()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("input_ids", (3, SLOTS)),
        ("input_ids", (ROWS, 8)),
        ("kv_length", (ROWS, 1)),
        ("past_key_values.0.key", (ROWS, 2, CAPACITY + 1, 4)),
        ("token_ids", (ROWS, 1)),
    ],
)
def test_a_shape_beyond_the_profile_is_refused(name: str, shape: tuple[int, ...]) -> None:
    assert not Bench().context.set_input_shape(name, shape)


@pytest.mark.parametrize("in_place", [True, False])
def test_past_and_present_are_one_where_the_engine_writes_in_place_only(in_place: bool) -> None:
    bench = Bench(in_place)
    there = bench.scratch if in_place else bench.addresses["past_key_values.1.key"]
    bench.context.set_tensor_address("present.1.key", there)
    assert "present.1.key is" in bench.refusal()


def test_the_first_run_after_a_change_of_shapes_is_not_captured() -> None:
    bench = Bench()
    assert bench.device.capture(bench.run) is None
    assert bench.run()
    assert bench.device.capture(bench.run) is not None
    bench.context.set_input_shape("input_ids", (ROWS, 1))
    assert bench.device.capture(bench.run) is None


@pytest.mark.parametrize("what", ["shape", "address", "context"])
def test_a_graph_goes_with_what_it_was_captured_from(what: str) -> None:
    bench = Bench()
    graph = bench.captured()
    if what == "shape":
        bench.context.set_input_shape("input_ids", (ROWS, 1))
    elif what == "address":
        bench.context.set_tensor_address("kv_length", bench.scratch)
    else:
        del bench.context
    with pytest.raises(AssertionError, match="a graph is launched after its context"):
        bench.device.launch(graph)
    if what == "context":
        with pytest.raises(AssertionError, match="gone before its graph"):
            bench.device.forget(graph)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda b: b.device.free(b.scratch), "the shared scratch memory is gone"),
        (lambda b: b.device.free(b.addresses["kv_length"]), "not of one allocation"),
        (lambda b: delattr(b, "context"), "gone before the stream has come to its step"),
    ],
)
def test_what_a_step_uses_outlives_it(broken: Callable[[Bench], None], words: str) -> None:
    bench = Bench()
    assert bench.run()
    queue, bench.device.queue = bench.device.queue, []  # `free` waits for the stream
    broken(bench)
    bench.device.queue = queue
    with pytest.raises(AssertionError, match=words):
        bench.device.synchronize()


def test_host_arrays_outlive_their_copies() -> None:
    for name in ("upload", "download"):
        device = FakeDevice()
        address, array = device.allocate(8), np.zeros(1, np.int64)
        device.upload(address, array) if name == "upload" else device.download(array, address)
        del array
        with pytest.raises(AssertionError, match="a host array is gone"):
            device.synchronize()


@pytest.mark.parametrize(
    ("lengths", "index", "words"),
    [(CAPACITY - 1, 0, "an update beyond the cache"), (0, SLOTS, "a prediction beyond the window")],
)
def test_a_step_beyond_its_memory_is_noticed(lengths: int, index: int, words: str) -> None:
    bench = Bench()
    for name, value in (("input_ids", 1), ("kv_length", lengths), ("output_index", index)):
        bench.device.view(bench.addresses[name], (2,), np.int64)[:] = value
    assert bench.run()
    with pytest.raises(AssertionError, match=words):
        bench.device.synchronize()


def test_a_capture_allows_nothing_but_a_step() -> None:
    bench = Bench()
    array, graph = np.zeros(1), bench.captured()
    calls: list[Callable[[], Any]] = [
        lambda: bench.device.allocate(1),
        lambda: bench.device.free(bench.scratch),
        lambda: bench.device.zero(bench.scratch, 1),
        lambda: bench.device.upload(bench.scratch, array),
        lambda: bench.device.download(array, bench.scratch),
        lambda: bench.device.copy_runs(Runs(bench.scratch, 1, 1), Runs(bench.scratch + 8, 1, 1), 1, 1, 1),
        lambda: bench.device.launch(graph),
        bench.device.synchronize,
    ]
    for call in calls:
        with pytest.raises(SessionError, match="not permitted when stream is capturing"):
            bench.device.capture(call)


def test_another_gpu_and_another_stream_are_refused() -> None:
    bench = Bench()
    with pytest.raises(AssertionError, match="the stream that the profile was chosen on"):
        bench.context.execute_async_v3(bench.device.stream + 1)
    bench.device.current.ordinal = 1
    for call in (bench.run, lambda: bench.device.allocate(1), bench.device.synchronize):
        with pytest.raises(AssertionError, match="another GPU is the current one"):
            call()


@pytest.mark.parametrize(
    ("target", "source", "words"),
    [
        (Runs(0, 7, 2), Runs(512, 8, 2), "cudaErrorInvalidPitchValue"),
        (Runs(0, 8, 2), Runs(512, 7, 2), "cudaErrorInvalidPitchValue"),
        (Runs(0, 8, 1), Runs(512, 8, 2), "slices overlap"),
        (Runs(0, 8, 2), Runs(12, 8, 2), "an overlap"),
        (Runs(0, 8, 2), Runs(1000, 8, 2), "not of one allocation"),
    ],
)
def test_a_copy_that_cuda_refuses_or_garbles(target: Runs, source: Runs, words: str) -> None:
    device = FakeDevice()
    base = device.allocate(1024)
    moved = [Runs(base + runs.address, runs.pitch, runs.per_slice) for runs in (target, source)]

    def copy() -> None:
        device.copy_runs(moved[0], moved[1], 8, 2, 2)
        device.synchronize()

    with pytest.raises(AssertionError, match=words):
        copy()
