"""What the TensorRT backend fills a step up to, and that the filling is in nobody's way."""

from __future__ import annotations

import numpy as np
import pytest
from support.fake import FakeBackend
from support.fake_engine import engine_info
from support.fake_trt import BLOCK, CAPACITY, PREFILL, build, predict

from mars_export import SessionError
from mars_export.runtime.decode.backend import StepInput
from mars_export.runtime.device.trt.shape_bucket import ShapeBucket


@pytest.mark.parametrize("kv_layout", ["in-place", "appended"])
def test_steps_are_filled_up_to_few_sizes(kv_layout: str) -> None:
    backend, engine, device = build(kv_layout)
    cache = backend.new_cache(1)
    reference = FakeBackend(predict, CAPACITY, PREFILL)
    other = reference.new_cache(1)
    other.reserve(CAPACITY)
    length = 0
    for slots in (1, 2, 3, 4, 5, 6, 7, 1, 3, 6, 7, 7, 7, 3):
        for count in range(1, slots + 1):
            ids = np.arange(1, slots + 1)[None] + count
            plan = StepInput(ids, np.array([length]), np.arange(count)[None])
            made, wanted = backend.step(cache, 0, plan, False), reference.step(other, 0, plan, False)
            assert made.token_ids.tolist() == wanted.token_ids.tolist()
            assert made.confidence == pytest.approx(wanted.confidence)
        length += slots
    bound = [c.shapes for c in engine.contexts if c.shapes]
    shapes = {(s["input_ids"][1], s["output_index"][1]) for s in bound}
    assert shapes <= {(s, o) for s in (1, BLOCK, 2 * BLOCK - 1) for o in (1, BLOCK, 2 * BLOCK - 1)}
    assert backend.num_graphs <= 9
    # Near its end a row has no room for filling.
    assert length == CAPACITY - 2
    entries = device.view(cache.memory.addresses[0], (2, CAPACITY, 4), np.float32)
    backend.step(cache, 0, StepInput(np.array([[9, 8]]), np.array([length]), np.array([[0]])), False)
    assert engine.contexts[-1].shapes["input_ids"] == (1, 2)
    assert entries[:, length:, 0].tolist() == [[9, 8]] * 2


def test_pieces_of_a_prompt_are_filled_up_to_powers_of_two() -> None:
    info = engine_info(1, BLOCK, 100)
    shape_bucket = ShapeBucket(info, 200, is_fixed=False)
    index = np.zeros((1, 1), np.int64)
    made = [
        shape_bucket.fill(StepInput(np.ones((1, slots), np.int64), np.array([0]), index)).input_ids.shape[1]
        for slots in (8, 16, 17, 33, 64, 65, 99, 100)
    ]
    assert made == [16, 16, 32, 64, 64, 100, 100, 100]
    ids, _, _ = shape_bucket.fill(StepInput(np.ones((1, 20), np.int64), np.array([170]), index))
    assert ids.shape == (1, 20), "32 slots would write beyond the row"


def test_an_engine_without_symbols_keeps_its_filling_out_of_the_way() -> None:
    backend, _, device = build(fixed=True)
    assert backend.max_capacity == CAPACITY - BLOCK
    assert backend.max_slots == BLOCK
    cache = backend.new_cache(3)
    backend.step(cache, 1, StepInput(np.array([[8, 9]]), np.array([0]), np.array([[1]])), False)
    keys = device.view(cache.memory.addresses[0], (5, 2, CAPACITY, 4), np.float32)
    assert keys[1, 0, :2, 0].tolist() == [8, 9]
    assert not keys[0].any()
    assert not keys[2:, :, : CAPACITY - BLOCK].any(), "rows that nobody prompts for write to the end only"
    with pytest.raises(SessionError, match="exactly 3 x 4"):
        backend.step(cache, 0, StepInput(np.zeros((1, 5), np.int64), np.array([0]), np.array([[0]])), False)
