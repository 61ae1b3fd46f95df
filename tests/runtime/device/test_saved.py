"""Entries that caches save and load: copies of their own, on the host, and on a fake GPU (engines)."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from support.fake_trt import BLOCK, build

from mars_export import GenerationConfig
from mars_export.runtime.decode.limits import Limits
from mars_export.runtime.decode.prefix import PrefixCache
from mars_export.runtime.decode.schedule import Schedule, run
from mars_export.runtime.decode.sequence import Sequence
from mars_export.runtime.device.kv import KvRows
from mars_export.runtime.device.trt.backend import TrtBackend

MASK, HEADS, DIM = 0, 2, 6


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_saved_entries_are_those_and_no_others(dtype: Any) -> None:
    draw = np.random.default_rng(0)
    rows = KvRows(4, 3, HEADS, DIM, np.dtype(dtype))
    rows.reserve(128)
    values = [draw.standard_normal((3, HEADS, 128, DIM)).astype(dtype) for _ in rows.buffers]
    for value in values:
        value[1, :, 50:] = np.nan  # behind the cursor
    for buffer, value in zip(rows.buffers, values, strict=True):
        buffer[:] = value
    saved = rows.save(1, 50)
    assert rows.entry_bytes == 4 * HEADS * DIM * np.dtype(dtype).itemsize
    for buffer in rows.buffers:
        buffer[:] = 0  # what was saved is a copy
    rows.reserve(300)
    rows.load(2, saved, 40)
    for now, value in zip(rows.buffers, values, strict=True):
        assert np.array_equal(now[2, :, :40], value[1, :, :40])
        assert np.isfinite(now).all()
        assert not now[:2].any(), "no other row is touched"
    later = KvRows(4, 1, HEADS, DIM, np.dtype(dtype))
    later.reserve(60)
    later.load(0, saved, 50)
    for buffer, value in zip(later.buffers, values, strict=True):
        assert np.array_equal(buffer[0, :, :50], value[1, :, :50])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_entries_come_from_the_host_and_go_there(dtype: Any) -> None:
    draw = np.random.default_rng(1)
    rows = KvRows(4, 2, HEADS, DIM, np.dtype(dtype))
    rows.reserve(128)
    arrays = [draw.standard_normal((HEADS, 2 * 30, DIM)).astype(dtype)[:, ::2] for _ in range(4)]
    there = rows.upload(arrays)
    rows.load(1, there, 30)
    for array, now in zip(arrays, rows.buffers, strict=True):
        assert np.array_equal(now[1, :, :30], array)
        assert not now[0].any()
    for array, back in zip(arrays, rows.download(rows.save(1, 25)), strict=True):
        assert np.array_equal(back, array[:, :25])
    for array, back in zip(arrays, rows.download(there), strict=True):
        assert np.array_equal(back, array)


def spoken(
    backend: TrtBackend, store: PrefixCache | None, prompts: list[list[int]], piece: int = 8
) -> list[Sequence]:
    config = GenerationConfig(tau=0.9, max_new_tokens=8, eos_ids=())
    rows = [
        Sequence(i, p, config, (), prefix_handle=store.handle() if store else None)
        for i, p in enumerate(prompts)
    ]
    for events in run(Schedule(backend, BLOCK, MASK, Limits(3, prefill_tokens=piece)), rows):
        assert all(event.error is None for event in events), events
    return rows


PROMPTS = [[*range(5, 29), last, 3] for last in (1, 2, 3, 4, 5)]


@pytest.mark.parametrize(
    ("kv_layout", "fixed"), [("in-place", False), ("appended", False), ("in-place", True), ("appended", True)]
)
def test_an_engine_says_the_same_with_a_store(kv_layout: str, fixed: bool) -> None:
    backend, _, device = build(kv_layout, fixed=fixed)
    store = PrefixCache(1 << 20, backend.reproducible_slots)
    plain = build(kv_layout, fixed=fixed)[0]
    for _ in range(3):
        had, wanted = spoken(backend, store, PROMPTS), spoken(plain, None, PROMPTS)
        assert [row.tokens for row in had] == [row.tokens for row in wanted]
    assert all(row.stats.cached_tokens == 24 for row in had)
    assert store.stats.failed == 0
    before = len(device.live)
    store.clear()
    gc.collect()
    spoken(backend, None, PROMPTS[:1])  # what was dropped is given back when memory is next asked for
    assert len(device.live) == before - 1


def test_a_gpu_without_room_saves_nothing_and_answers() -> None:
    backend, _, device = build()
    spoken(backend, None, PROMPTS)
    store, device.left = PrefixCache(1 << 20, backend.reproducible_slots), 0
    had = spoken(backend, store, PROMPTS)
    assert [row.tokens for row in had] == [row.tokens for row in spoken(build()[0], None, PROMPTS)]
    assert store.stats.entries == 0
    assert store.stats.failed > 0
