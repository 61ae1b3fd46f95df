"""KV entries of rows on a fake GPU, as the TensorRT backend moves, copies and places them."""

from __future__ import annotations

import numpy as np
import pytest
from support.fake_engine import MODEL
from support.fake_trt import BLOCK, CAPACITY, build

from mars_export.runtime.decode.backend import StepInput


def test_a_row_is_moved_with_all_its_heads() -> None:
    backend, _, device = build()
    cache = backend.new_cache(3)
    backend.step(cache, 2, StepInput(np.array([[8, 9, 10]]), np.array([0]), np.array([[0]])), False)
    cache.move(2, 0, 2)
    keys = device.view(cache.memory.addresses[3], (3, 2, CAPACITY, 4), np.float32)
    assert (keys[0, :, :2] == np.array([8, 9])[None, :, None]).all()
    assert not keys[0, :, 2:].any()
    assert not keys[1].any()
    cache.move(2, 1, 0)
    assert not keys[1].any()


def test_copies_between_rows_are_one_call_each() -> None:
    backend, _, device = build()
    cache = backend.new_cache(3)
    backend.step(cache, 0, StepInput(np.array([[8, 9, 10]]), np.array([0]), np.array([[0]])), False)
    device.events.clear()
    cache.move(0, 2, 3)
    saved = cache.save(0, 3)
    cache.load(1, saved, 2)
    cache.move(1, 1, 2)
    device.synchronize()
    entries = 2 * MODEL.num_layers * MODEL.num_kv_heads * MODEL.head_dim * 4
    assert device.events[:-1] == [("copy", 3 * entries), ("copy", 3 * entries), ("copy", 2 * entries)]
    for address in cache.memory.addresses:
        keys = device.view(address, (3, 2, CAPACITY, 4), np.float32)
        assert keys[:, 1, :4, 2].tolist() == [[8, 9, 10, 0], [8, 9, 0, 0], [8, 9, 10, 0]]


@pytest.mark.parametrize("fixed", [False, True], ids=["ranges", "fixed"])
def test_new_entries_are_placed_by_one_copy_a_row(fixed: bool) -> None:
    backend, _, device = build("appended", fixed=fixed)
    cache = backend.new_cache(3)
    lengths = np.zeros(2, np.int64)
    for slots in (1, 3, BLOCK):  # sizes whose tensors would not begin where they may without a gap
        for _ in range(3):
            device.events.clear()
            index = np.zeros((2, 1), np.int64)
            backend.step(cache, 1, StepInput(np.full((2, slots), slots + 3), lengths, index), False)
            written = (
                (BLOCK if fixed or slots > 1 else 1)
                * 2
                * MODEL.num_layers
                * MODEL.num_kv_heads
                * MODEL.head_dim
                * 4
            )
            assert [size for kind, size in device.events if kind == "copy"] == [written, written]
            lengths += slots
    for address in cache.memory.addresses:
        keys = device.view(address, (3, 2, CAPACITY, 4), np.float32)
        assert keys[1:, 1, :24, 3].tolist() == [[4.0] * 3 + [6.0] * 9 + [7.0] * 12] * 2
        assert not keys[0].any()
