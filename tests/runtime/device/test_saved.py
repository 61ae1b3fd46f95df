"""Entries that caches save and load on a fake GPU (engines). Those of the host: runtime/session."""

from __future__ import annotations

import gc

import pytest
from support.fake_trt import BLOCK, build

from mars_export import GenerationConfig
from mars_export.runtime.decode.limits import Limits
from mars_export.runtime.decode.prefix import PrefixCache
from mars_export.runtime.decode.schedule import Schedule, run
from mars_export.runtime.decode.sequence import Sequence
from mars_export.runtime.device.trt.backend import TrtBackend

MASK, HEADS, DIM = 0, 2, 6


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
