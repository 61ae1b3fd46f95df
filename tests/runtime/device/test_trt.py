"""The TensorRT backend over a fake GPU: addresses, shapes, ranges, cursors, captured steps and the order on
the stream.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from support.fake import MASK, FakeBackend
from support.fake_cuda import MODEL, FakeDevice, FakeEngine, engine_info, engine_variant

from mars_export.runtime import Commit, GenerationConfig, SessionError
from mars_export.runtime.decode.backend import Backend
from mars_export.runtime.decode.blocks import decode_blocks
from mars_export.runtime.decode.row import Row
from mars_export.runtime.decode.schedule import decode
from mars_export.runtime.device.filling import Filling
from mars_export.runtime.device.trt import TrtBackend, TrtCache

BLOCK, CAPACITY, PREFILL = 4, 64, 16


def predict(known: tuple[int, ...], masks: int) -> tuple[int, float]:
    """A token and a confidence that depend on everything seen, and are sure about two times in three."""
    mixed = (sum((i + 3) * t for i, t in enumerate(known)) * 31 + masks * 17) % 997
    return mixed + 1, 0.95 if mixed % 3 else 0.4


def build(
    kv_layout: str = "static",
    *,
    fixed: bool = False,
    batch: int = 3,
    refuse: bool = False,
    top_k: int = 0,
) -> tuple[TrtBackend, FakeEngine, FakeDevice]:
    device = FakeDevice(refuse_capture=refuse)
    info = engine_info(batch, BLOCK, PREFILL, fixed=fixed)
    engine = FakeEngine(device, info, predict, kv_layout == "static", top_k)
    variant = engine_variant(info, CAPACITY, kv_layout, fixed=fixed, top_k=top_k > 0)
    backend = TrtBackend(engine, variant, MODEL, device)  # type: ignore[arg-type]
    return backend, engine, device


def answers(backend: Backend, prompts: list[list[int]], commit: Commit, new: int = 20) -> list[list[int]]:
    rows = [
        Row(i, p, GenerationConfig(tau=0.9, max_new_tokens=new - i, eos_ids=()), ())
        for i, p in enumerate(prompts)
    ]
    steps = (
        decode(backend, rows, BLOCK, MASK)
        if commit.kind == "cursor"
        else decode_blocks(backend, rows, BLOCK, MASK, commit.cache_block)
    )
    for _ in steps:
        pass
    return [row.tokens for row in rows]


PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30]]


@pytest.mark.parametrize("commit", [Commit(), Commit("block", 4)], ids=["cursor", "block"])
@pytest.mark.parametrize("refuse", [False, True], ids=["graphs", "plain"])
@pytest.mark.parametrize(
    ("kv_layout", "fixed"), [("static", False), ("delta", False), ("static", True), ("delta", True)]
)
def test_the_loops_accept_what_they_accept_elsewhere(
    kv_layout: str, fixed: bool, refuse: bool, commit: Commit
) -> None:
    backend, _, device = build(kv_layout, fixed=fixed, refuse=refuse)
    expected = answers(FakeBackend(predict, backend.max_capacity, backend.max_slots), PROMPTS, commit)
    for _ in range(3):  # the second time on memory that was used, the third with captured steps
        assert answers(backend, PROMPTS, commit) == expected
    assert (device.launches > 0) == (not refuse)
    assert backend.num_graphs == device.graphs


@pytest.mark.parametrize("fixed", [False, True], ids=["ranges", "fixed"])
def test_a_row_near_its_end_shares_a_step_with_a_row_that_looks_far_ahead(fixed: bool) -> None:
    backend, _, _ = build(fixed=fixed)
    prompts = [[5] * (backend.max_capacity - 2), [6]]
    expected = answers(FakeBackend(predict, backend.max_capacity, backend.max_slots), prompts, Commit(), 30)
    assert answers(backend, prompts, Commit(), 30) == expected


def test_only_ids_and_confidences_come_back_in_stream_order() -> None:
    backend, _, device = build()
    cache = backend.new_cache(3)
    device.events.clear()
    ids, index = np.full((3, BLOCK), 7), np.tile(np.arange(BLOCK), (3, 1))
    for _ in range(3):
        device.events.clear()
        backend.step(cache, 0, ids, np.zeros(3, np.int64), index, False)
        kinds = [kind for kind, _ in device.events]
        assert kinds == ["upload", "execute", "download", "synchronize"], "one copy each way, one wait"
        sizes = {kind: size for kind, size in device.events if kind != "execute"}
        assert sizes["download"] == 2 * 256, "ids and confidences, each from where a tensor may begin"
        assert sizes["upload"] == 2 * 256 + ids.size * 8, "the ids of this step, not of the widest"
    assert device.launches == 2, "the first run prepares, the second is captured and replayed"


@pytest.mark.parametrize("fixed", [False, True], ids=["ranges", "fixed"])
@pytest.mark.parametrize("kv_layout", ["static", "delta"])
def test_the_likeliest_tokens_come_back_for_each_prediction(kv_layout: str, fixed: bool) -> None:
    backend, _, device = build(kv_layout, fixed=fixed, top_k=5)
    cache = backend.new_cache(3)
    ids, index = np.array([[8, 9], [7, 6]]), np.array([[1, 0], [0, 1]])
    for _ in range(3):  # the last time from a captured step
        got = backend.step(cache, 1, ids, np.zeros(2, np.int64), index, False)
        assert got.topk_ids is not None and got.topk_logprobs is not None
        assert got.topk_ids.dtype == np.int64 and got.topk_logprobs.dtype == np.float32
        assert (got.topk_ids == got.token_ids[..., None] + np.arange(5)).all()
        np.testing.assert_allclose(got.topk_logprobs[..., 0], np.log(got.confidence), rtol=1e-6)
        assert got.topk_ids.shape == (2, 2, 5) and got.logits is None
    assert device.launches > 0


def test_memory_is_allocated_once() -> None:
    backend, _, device = build()
    answers(backend, PROMPTS, Commit())
    gc.collect()
    before = len(device.allocations)
    for _ in range(20):
        answers(backend, PROMPTS[:2], Commit(), new=6)
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
    cache = backend.new_cache(1)
    for address in cache.memory.addresses:
        device.view(address, (cache.memory.tensor_bytes // 4,), np.float32)[:] = np.inf
    del cache
    gc.collect()
    again = backend.new_cache(1)
    assert all(
        (device.view(a, (again.memory.tensor_bytes // 4,), np.float32) == 0).all()
        for a in again.memory.addresses
    )


def test_the_memory_goes_with_the_backend() -> None:
    backend, engine, device = build()
    cache = backend.new_cache(1)
    for slots in (2, PREFILL):
        for _ in range(3):
            backend.step(cache, 0, np.full((1, slots), 3), np.array([0]), np.array([[1]]), False)
    assert not device.closed
    del backend, cache
    gc.collect()
    assert device.closed == 1
    assert (device.forgotten, device.graphs) == (1, 1)
    assert not any(context.is_alive for context in engine.contexts)


def test_ranges_are_chosen_by_shape() -> None:
    backend, engine, _ = build()
    cache = backend.new_cache(3)
    step = lambda rows, slots, first=0: backend.step(  # noqa: E731
        cache,
        first,
        np.full((rows, slots), 3),
        np.zeros(rows, np.int64),
        np.zeros((rows, 1), np.int64),
        False,
    )
    step(1, 1)
    step(3, 2 * BLOCK - 1)
    assert [c.range_index for c in engine.contexts] == [0, 0], "decode, a context for each shape"
    step(1, 2 * BLOCK)
    step(2, PREFILL)
    step(1, PREFILL, 2)
    assert [c.range_index for c in engine.contexts] == [0, 0, 1], "prefill, one context for all"
    last = engine.contexts[-1]
    assert last.shapes["input_ids"] == (1, PREFILL)
    assert last.shapes["past_key_values.1.value"] == (1, 2, CAPACITY, 4)
    assert last.addresses["past_key_values.0.key"] == cache.memory.addresses[0] + 2 * cache.memory.row_bytes
    with pytest.raises(
        SessionError,
        match=r"1 x 17 slots with 1 predictions is beyond this engine \(decode: 1-3 x 1-7; prefill: 1-3 x"
        r" 1-16",
    ):
        step(1, PREFILL + 1)


def test_a_captured_step_belongs_to_its_rows_and_memory() -> None:
    backend, engine, device = build()
    one, two = backend.new_cache(2), backend.new_cache(2)
    ids, index = np.array([[4, 5]]), np.array([[1]])
    for cache in (one, two):
        for first in (0, 1):
            for _ in range(3):
                backend.step(cache, first, ids + first, np.array([0]), index, False)
    assert device.graphs == 4
    assert len({c.addresses["past_key_values.0.key"] for c in engine.contexts}) == 4
    for cache in (one, two):
        keys = device.view(cache.memory.addresses[0], (2, 2, CAPACITY, 4), np.float32)
        assert keys[:2, 0, :2, 0].tolist() == [[4, 5], [5, 6]]


def test_captured_steps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mars_export.runtime.device.trt.MOST_GRAPHS", 3)
    backend, _, device = build()
    cache = backend.new_cache(3)
    for rows in (1, 2, 3):
        for slots in (1, BLOCK) if rows < 3 else (1, BLOCK, 1):
            for _ in range(2):
                ids, index = np.full((rows, slots), 2), np.zeros((rows, 1), np.int64)
                backend.step(cache, 0, ids, np.zeros(rows, np.int64), index, False)
    assert backend.num_graphs == 3
    assert device.forgotten == 3


@pytest.mark.parametrize("kv_layout", ["static", "delta"])
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
            feed = (ids, np.array([length]), np.arange(count)[None], False)
            made, wanted = backend.step(cache, 0, *feed), reference.step(other, 0, *feed)
            assert made.token_ids.tolist() == wanted.token_ids.tolist()
            assert made.confidence == pytest.approx(wanted.confidence)
        length += slots
    shapes = {(c.shapes["input_ids"][1], c.shapes["output_index"][1]) for c in engine.contexts}
    assert shapes <= {(s, o) for s in (1, BLOCK, 2 * BLOCK - 1) for o in (1, BLOCK, 2 * BLOCK - 1)}
    assert backend.num_graphs <= 9
    # Near its end a row has no room for filling.
    assert length == CAPACITY - 2
    entries = device.view(cache.memory.addresses[0], (2, CAPACITY, 4), np.float32)
    backend.step(cache, 0, np.array([[9, 8]]), np.array([length]), np.array([[0]]), False)
    assert engine.contexts[-1].shapes["input_ids"] == (1, 2)
    assert entries[:, length:, 0].tolist() == [[9, 8]] * 2


def test_pieces_of_a_prompt_are_filled_up_to_powers_of_two() -> None:
    info = engine_info(1, BLOCK, 100)
    filling = Filling(info, 200, is_fixed=False)
    index = np.zeros((1, 1), np.int64)
    made = [
        filling.fill(np.ones((1, slots), np.int64), np.array([0]), index)[0].shape[1]
        for slots in (8, 16, 17, 33, 64, 65, 99, 100)
    ]
    assert made == [16, 16, 32, 64, 64, 100, 100, 100]
    ids, _, _ = filling.fill(np.ones((1, 20), np.int64), np.array([170]), index)
    assert ids.shape == (1, 20), "32 slots would write beyond the row"


def test_a_row_is_moved_with_all_its_heads() -> None:
    backend, _, device = build()
    cache = backend.new_cache(3)
    backend.step(cache, 2, np.array([[8, 9, 10]]), np.array([0]), np.array([[0]]), False)
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
    backend.step(cache, 0, np.array([[8, 9, 10]]), np.array([0]), np.array([[0]]), False)
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
    backend, _, device = build("delta", fixed=fixed)
    cache = backend.new_cache(3)
    lengths = np.zeros(2, np.int64)
    for slots in (1, 3, BLOCK):  # sizes whose tensors would not begin where they may without a gap
        for _ in range(3):
            device.events.clear()
            index = np.zeros((2, 1), np.int64)
            backend.step(cache, 1, np.full((2, slots), slots + 3), lengths, index, False)
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


def test_whose_gpu_is_current_in_a_thread_does_not_matter() -> None:
    backend, _, device = build("delta")
    device.current.ordinal = 3
    cache = backend.new_cache(2)
    for _ in range(3):
        backend.step(cache, 0, np.array([[8, 9]]), np.array([0]), np.array([[0]]), False)
    cache.load(1, cache.save(0, 2), 2)
    fetched = cache.fetch(cache.save(1, 2))
    assert fetched[0][0, :, 0].tolist() == [8, 9]
    assert device.current.ordinal == 3, "it is left as it was found"
    del backend, cache
    gc.collect()
    assert (device.closed, device.current.ordinal) == (1, 3)


def test_an_engine_without_symbols_keeps_its_filling_out_of_the_way() -> None:
    backend, _, device = build(fixed=True)
    assert backend.max_capacity == CAPACITY - BLOCK
    assert backend.max_slots == BLOCK
    cache = backend.new_cache(3)
    backend.step(cache, 1, np.array([[8, 9]]), np.array([0]), np.array([[1]]), False)
    keys = device.view(cache.memory.addresses[0], (5, 2, CAPACITY, 4), np.float32)
    assert keys[1, 0, :2, 0].tolist() == [8, 9]
    assert not keys[0].any()
    assert not keys[2:, :, : CAPACITY - BLOCK].any(), "rows that nobody prompts for write to the end only"
    with pytest.raises(SessionError, match="exactly 3 x 4"):
        backend.step(cache, 0, np.zeros((1, 5), np.int64), np.array([0]), np.array([[0]]), False)


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(
        SessionError, match="4 rows, but this engine was built for at most 3; build it again with --batch 4"
    ):
        build()[0].new_cache(4)


def test_a_failing_step_says_what_tensorrt_said() -> None:
    backend, engine, _ = build()
    engine.fails = True
    cache = backend.new_cache(1)
    with pytest.raises(
        SessionError, match="TensorRT failed in a step of 1 x 4 slots: the fake was told to fail"
    ):
        backend.step(cache, 0, np.array([[1, 2]]), np.array([0]), np.array([[0]]), False)


def test_an_engine_of_another_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _, _ = build()
    monkeypatch.setattr(
        "support.fake_cuda.FakeContext.set_tensor_address",
        lambda self, name, address: name != "present.1.key",
    )
    cache = backend.new_cache(1)
    with pytest.raises(
        SessionError,
        match=r"the engine and the manifest disagree about present.1.key; build the engine again",
    ):
        backend.step(cache, 0, np.array([[1, 2]]), np.array([0]), np.array([[0]]), False)


def test_kernels_are_kept_after_what_is_new_only() -> None:
    backend, engine, _ = build()
    cache: Any = backend.new_cache(1)
    assert isinstance(cache, TrtCache)
    for _ in range(4):
        backend.step(cache, 0, np.array([[1, 2]]), np.array([0]), np.array([[0]]), False)
    assert engine.kept == 1


@pytest.mark.parametrize("kv_layout", ["static", "delta"])
@pytest.mark.parametrize("cache_block", [8, 12, PREFILL])
def test_a_row_near_its_end_fails_no_other_in_wide_blocks(kv_layout: str, cache_block: int) -> None:
    """Blocks may be wider than a decode step: the long row has no room for the slots of its neighbours."""
    backend, _, _ = build(kv_layout)
    for end in (1, 3, 5, 9):
        long = [(7 * i) % 90 + 1 for i in range(backend.max_capacity - end)]
        for prompts in ([long, [6], [5, 4]], [[6], long, [5, 4]], [[6], [5, 4], long]):
            reference = FakeBackend(predict, backend.max_capacity, backend.max_slots)
            expected = answers(reference, prompts, Commit("block", cache_block), 30)
            assert answers(backend, prompts, Commit("block", cache_block), 30) == expected


def test_a_row_that_is_too_long_is_told_so() -> None:
    backend, _, _ = build()
    cache = backend.new_cache(2)
    lengths, index = np.array([CAPACITY - 1, 0]), np.array([[1], [1]])
    with pytest.raises(
        SessionError, match="would write entry 65 of a row, this engine holds 64; shorten the prompt"
    ):
        backend.step(cache, 0, np.full((2, 2), 5), lengths, index, False)


def test_the_most_predictions_are_the_engines() -> None:
    assert build()[0].max_outputs == 2 * BLOCK - 1
    assert build(fixed=True)[0].max_outputs == BLOCK
    backend, _, _ = build()
    index = np.zeros((1, 2 * BLOCK), np.int64)
    with pytest.raises(SessionError, match="1 x 7 slots with 8 predictions is beyond this engine"):
        backend.step(backend.new_cache(1), 0, np.full((1, 7), 5), np.array([0]), index, False)


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
    backend.step(cache, 0, np.array([[1, 2]]), np.array([0]), np.array([[0]]), False)
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
        backend.step(one, 0, ids, np.array([0]), index, False)
        backend.step(one, 0, wide, np.array([0]), index, False)
    assert backend.num_graphs == 1
    del one
    gc.collect()
    three = backend.new_cache(3)
    three.reserve(1)
    assert address not in device.live, "three rows beside the idle one are more than the engine takes"
    assert (backend.num_graphs, device.forgotten) == (0, 1)
    for _ in range(3):
        backend.step(three, 0, ids, np.array([0]), index, False)
        backend.step(three, 0, wide, np.array([0]), index, False)
    assert engine.contexts[-1].addresses["past_key_values.0.key"] in device.live


def test_memory_that_begins_where_older_memory_did_is_bound_anew() -> None:
    backend, _, device = build()
    one = backend.new_cache(1)
    address = one.memory.addresses[0]
    feeds = [(np.full((1, slots), 4), np.array([0]), np.array([[1]]), False) for slots in (2, PREFILL)]
    expected = [[backend.step(one, 0, *feed).token_ids.tolist() for _ in range(3)] for feed in feeds]
    del one
    gc.collect()
    three = backend.new_cache(3)
    three.reserve(1)
    device.spare = [address]
    again = backend.new_cache(1)
    assert (again.memory.addresses[0], three.memory.num_rows) == (address, 3)
    assert [
        [backend.step(again, 0, *feed).token_ids.tolist() for _ in range(3)] for feed in feeds
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
    backend.step(cache, 0, np.array([[1, 2]]), np.array([0]), np.array([[0]]), False)


def test_a_step_that_would_allocate_is_not_captured() -> None:
    backend, engine, device = build()
    engine.allocates = True
    cache = backend.new_cache(1)
    for _ in range(4):
        backend.step(cache, 0, np.array([[1, 2]]), np.array([0]), np.array([[0]]), False)
    assert (device.graphs, device.launches, backend.num_graphs) == (0, 0, 0)


def test_an_error_that_stays_is_told_each_time() -> None:
    backend, _, device = build()
    cache = backend.new_cache(1)
    device.is_broken = True
    for _ in range(3):
        with pytest.raises(SessionError, match="CUDA: .* failed: an illegal memory access was encountered"):
            backend.step(cache, 0, np.array([[1, 2]]), np.array([0]), np.array([[0]]), False)


def test_an_error_that_stays_is_told_when_tensorrt_meets_it_first() -> None:
    backend, engine, device = build()
    cache = backend.new_cache(1)
    feed = (np.array([[1, 2]]), np.array([0]), np.array([[0]]), False)
    for _ in range(3):
        backend.step(cache, 0, *feed)
    engine.breaks = True
    for _ in range(2):
        with pytest.raises(SessionError, match="illegal memory access .* start it again"):
            backend.step(cache, 0, np.array([[1]]), *feed[1:])
    del cache, backend
    gc.collect()
    assert device.closed == 1, "without a word"


def test_a_step_that_failed_leaves_the_next_one_right() -> None:
    backend, engine, _ = build()
    cache = backend.new_cache(1)
    feed = (np.array([[1, 2]]), np.array([0]), np.array([[0]]), False)
    expected = backend.step(cache, 0, *feed).token_ids.tolist()
    for _ in range(3):
        engine.fails = True
        with pytest.raises(SessionError, match="TensorRT failed"):
            backend.step(backend.new_cache(1), 0, *feed)
        engine.fails = False
        assert backend.step(cache, 0, *feed).token_ids.tolist() == expected
