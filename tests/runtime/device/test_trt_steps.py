"""Steps of the TensorRT backend over a fake GPU: answers of the loops, results, shapes and the order on the
stream."""

from __future__ import annotations

import numpy as np
import pytest
from support.fake import FakeBackend
from support.fake_trt import BLOCK, CAPACITY, PREFILL, PROMPTS, answers, build, predict

from mars_export import SessionError
from mars_export.runtime.decode.backend import StepInput


@pytest.mark.parametrize("cache_block", [1, 4], ids=["cursor", "block"])
@pytest.mark.parametrize("refuse", [False, True], ids=["graphs", "plain"])
@pytest.mark.parametrize(
    ("kv_layout", "fixed"), [("in-place", False), ("appended", False), ("in-place", True), ("appended", True)]
)
def test_the_loops_accept_what_they_accept_elsewhere(
    kv_layout: str, fixed: bool, refuse: bool, cache_block: int
) -> None:
    backend, _, device = build(kv_layout, fixed=fixed, refuse=refuse)
    expected = answers(FakeBackend(predict, backend.max_capacity, backend.max_slots), PROMPTS, cache_block)
    for _ in range(3):  # the second time on memory that was used, the third with captured steps
        assert answers(backend, PROMPTS, cache_block) == expected
    assert (device.launches > 0) == (not refuse)
    assert backend.num_graphs == device.graphs - device.forgotten


def test_only_ids_and_confidences_come_back_in_stream_order() -> None:
    backend, _, device = build()
    cache = backend.new_cache(3)
    device.events.clear()
    ids, index = np.full((3, BLOCK), 7), np.tile(np.arange(BLOCK), (3, 1))
    for _ in range(3):
        device.events.clear()
        backend.step(cache, 0, StepInput(ids, np.zeros(3, np.int64), index), False)
        kinds = [kind for kind, _ in device.events]
        assert kinds == ["upload", "execute", "download", "synchronize"], "one copy each way, one wait"
        sizes = {kind: size for kind, size in device.events if kind != "execute"}
        assert sizes["download"] == 2 * 256, "ids and confidences, each from where a tensor may begin"
        assert sizes["upload"] == 2 * 256 + ids.size * 8, "the ids of this step, not of the widest"
    assert device.launches == 2, "the first run prepares, the second is captured and replayed"


def test_of_equally_likely_tokens_the_lowest_id_wins() -> None:
    """TensorRT's TopK has no order among equal values."""
    backend, engine, _ = build(top_k=5)
    engine.ties = 3
    ids, index = np.array([[8, 9]]), np.array([[1, 0]])
    got = backend.step(backend.new_cache(1), 0, StepInput(ids, np.zeros(1, np.int64), index), False)
    assert got.topk_ids is not None and got.topk_logprobs is not None
    assert (got.topk_logprobs[..., :3] == got.topk_logprobs[..., :1]).all()
    assert (np.diff(got.topk_ids[..., :3]) > 0).all() and (got.token_ids == got.topk_ids[..., 0]).all()


@pytest.mark.parametrize("fixed", [False, True], ids=["ranges", "fixed"])
@pytest.mark.parametrize("kv_layout", ["in-place", "appended"])
def test_the_likeliest_tokens_come_back_for_each_prediction(kv_layout: str, fixed: bool) -> None:
    backend, _, device = build(kv_layout, fixed=fixed, top_k=5)
    cache = backend.new_cache(3)
    ids, index = np.array([[8, 9], [7, 6]]), np.array([[1, 0], [0, 1]])
    for _ in range(3):  # the last time from a captured step
        got = backend.step(cache, 1, StepInput(ids, np.zeros(2, np.int64), index), False)
        assert got.topk_ids is not None and got.topk_logprobs is not None
        assert got.topk_ids.dtype == np.int64 and got.topk_logprobs.dtype == np.float32
        assert (got.topk_ids == got.token_ids[..., None] + np.arange(5)).all()
        np.testing.assert_allclose(got.topk_logprobs[..., 0], np.log(got.confidence), rtol=1e-6)
        assert got.topk_ids.shape == (2, 2, 5) and got.logits is None
    assert device.launches > 0


def test_ranges_are_chosen_by_shape() -> None:
    backend, engine, _ = build()
    cache = backend.new_cache(3)
    step = lambda rows, slots, first=0: backend.step(  # noqa: E731
        cache,
        first,
        StepInput(np.full((rows, slots), 3), np.zeros(rows, np.int64), np.zeros((rows, 1), np.int64)),
        False,
    )
    step(1, 1)
    step(3, 2 * BLOCK - 1)
    assert [c.range_index for c in engine.contexts] == [0, 0, 0, 1, 0], "those of the opening, and another"
    step(1, 2 * BLOCK)
    step(2, PREFILL)
    step(1, PREFILL, 2)
    assert len(engine.contexts) == 5, "prefill, one context for all"
    last = engine.contexts[3]
    assert last.shapes["input_ids"] == (1, PREFILL)
    assert last.shapes["past_key_values.1.value"] == (1, 2, CAPACITY, 4)
    assert last.addresses["past_key_values.0.key"] == cache.memory.addresses[0] + 2 * cache.memory.row_bytes
    with pytest.raises(
        SessionError,
        match=r"1 x 17 slots with 1 predictions is beyond this engine \(decode: 1-3 x 1-7; prefill: 1-3 x"
        r" 1-16",
    ):
        step(1, PREFILL + 1)


@pytest.mark.parametrize("kv_layout", ["in-place", "appended"])
@pytest.mark.parametrize("cache_block", [8, 12, PREFILL])
def test_a_row_near_its_end_fails_no_other_in_wide_blocks(kv_layout: str, cache_block: int) -> None:
    """Blocks may be wider than a decode step: the long row has no room for the slots of its neighbours."""
    backend, _, _ = build(kv_layout)
    for end in (1, 3, 5, 9):
        long = [(7 * i) % 90 + 1 for i in range(backend.max_capacity - end)]
        for prompts in ([long, [6], [5, 4]], [[6], long, [5, 4]], [[6], [5, 4], long]):
            reference = FakeBackend(predict, backend.max_capacity, backend.max_slots)
            expected = answers(reference, prompts, cache_block, 30)
            assert answers(backend, prompts, cache_block, 30) == expected
