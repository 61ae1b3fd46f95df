"""Memory of the TensorRT backend on a fake GPU: had once, used again, given back, and not to be had."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from support.fake_cuda import FakeDevice
from support.fake_engine import MODEL, FakeEngine, engine_info, engine_variant
from support.fake_trt import BLOCK, CAPACITY, PREFILL, PROMPTS, answers, build, predict

from mars_export import SessionError
from mars_export.runtime.decode.backend import StepInput
from mars_export.runtime.device.trt.backend import TrtBackend


def test_memory_is_allocated_once() -> None:
    backend, _, device = build()
    answers(backend, PROMPTS, 1)
    gc.collect()
    before = len(device.allocations)
    for _ in range(20):
        answers(backend, PROMPTS[:2], 1, new=6)
    assert len(device.allocations) == before
    lazy = backend.new_cache(3)
    assert (lazy.capacity, len(device.allocations)) == (0, before), "nothing before it is used"
    one, two = backend.new_cache(1), backend.new_cache(1)
    assert one.memory != two.memory, "two at once do not share"
    row_bytes = MODEL.num_kv_heads * CAPACITY * MODEL.head_dim * 4
    block = 2 * MODEL.num_layers * row_bytes
    assert device.allocations.count(3 * block) == 1, "what was given back serves again"
    assert device.allocations.count(block) == 1, "one row takes the memory of one"


def test_memory_that_is_used_again_holds_no_old_entries() -> None:
    backend, _, device = build()
    cache = backend.new_cache(2)
    rows = [
        device.view(address, (2, cache.memory.row_bytes // 4), np.float32)
        for address in cache.memory.addresses
    ]
    for each in rows:
        each[:] = np.inf
    cache.release(1)
    device.synchronize()
    assert all((each == [[np.inf], [0]]).all() for each in rows), "the row alone"
    del cache
    gc.collect()
    again = backend.new_cache(1)
    assert all(
        (device.view(a, (again.memory.num_rows * again.memory.row_bytes // 4,), np.float32) == 0).all()
        for a in again.memory.addresses
    )


def test_the_memory_goes_with_the_backend() -> None:
    backend, engine, device = build()
    cache = backend.new_cache(1)
    for slots in (2, PREFILL):
        for _ in range(3):
            backend.step(cache, 0, StepInput(np.full((1, slots), 3), np.array([0]), np.array([[1]])), False)
    assert not device.closed
    del backend, cache
    gc.collect()
    assert device.closed == 1
    assert (device.forgotten, device.graphs) == (1, 1)
    assert not any(context.is_alive for context in engine.contexts)


def test_memory_that_cannot_be_had_is_said_and_nothing_is_lost() -> None:
    backend, _, device = build()
    held = set(device.live)
    device.left = 0
    with pytest.raises(
        SessionError,
        match=r"KV entries of 3 row\(s\) of 64 take 0 MB"
        r" .*cudaErrorMemoryAlloc",
    ):
        backend.new_cache(3).reserve(1)
    assert set(device.live) == held, "what was had of it is given back"
    device.left = None
    cache = backend.new_cache(1)
    backend.step(cache, 0, StepInput(np.array([[1, 2]]), np.array([0]), np.array([[0]])), False)
    del cache
    gc.collect()
    device.left = 0
    with pytest.raises(SessionError, match="not enough memory"):
        backend.new_cache(3).reserve(1)
    assert set(device.live) == held, "and so is what lay idle"


def test_idle_memory_makes_room_and_no_step_stays_bound_to_it() -> None:
    backend, engine, device = build()
    one = backend.new_cache(1)
    address = one.memory.addresses[0]
    ids, index = np.array([[4, 5]]), np.array([[1]])
    wide = np.full((1, PREFILL), 4)
    for _ in range(3):
        backend.step(one, 0, StepInput(ids, np.array([0]), index), False)
        backend.step(one, 0, StepInput(wide, np.array([0]), index), False)
    assert backend.num_graphs == 1
    del one
    gc.collect()
    three = backend.new_cache(3)
    three.reserve(1)
    assert address not in device.live, "three rows beside the idle one are more than the engine takes"
    assert (backend.num_graphs, device.forgotten) == (0, 1)
    for _ in range(3):
        backend.step(three, 0, StepInput(ids, np.array([0]), index), False)
        backend.step(three, 0, StepInput(wide, np.array([0]), index), False)
    assert engine.contexts[-1].addresses["past_key_values.0.key"] in device.live


def test_memory_that_begins_where_older_memory_did_is_bound_anew() -> None:
    backend, _, device = build()
    one = backend.new_cache(1)
    address = one.memory.addresses[0]
    plans = [StepInput(np.full((1, slots), 4), np.array([0]), np.array([[1]])) for slots in (2, PREFILL)]
    expected = [[backend.step(one, 0, plan, False).token_ids.tolist() for _ in range(3)] for plan in plans]
    del one
    gc.collect()
    three = backend.new_cache(3)
    three.reserve(1)
    device.spare = [address]
    again = backend.new_cache(1)
    assert (again.memory.addresses[0], three.memory.num_rows) == (address, 3)
    assert [
        [backend.step(again, 0, plan, False).token_ids.tolist() for _ in range(3)] for plan in plans
    ] == expected


def test_rows_that_are_not_aligned_are_refused_before_tensorrt_is_asked() -> None:
    device, info = FakeDevice(), engine_info(2, BLOCK, PREFILL)
    engine = FakeEngine(device, info, predict)
    engine.capacity = 63
    backend = TrtBackend(engine, engine_variant(info, 63), MODEL, device)  # type: ignore[arg-type]
    with pytest.raises(
        SessionError, match="do not begin at multiples of 256 bytes.*--capacity .* multiple of 64"
    ):
        backend.new_cache(2)
    cache = backend.new_cache(1)
    backend.step(cache, 0, StepInput(np.array([[1, 2]]), np.array([0]), np.array([[0]])), False)
