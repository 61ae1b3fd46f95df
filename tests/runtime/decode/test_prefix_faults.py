"""Saved prefixes where something goes wrong: rows that are cancelled, fail or cannot load, threads that share
a store, and entries that go while they are loaded.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
from support.chaos import BLOCK, chaotic
from support.fake import MASK, FakeBackend, FakeCache
from support.loops import outcomes
from support.prefixes import PLENTY, SYSTEM, Strict, found, greedy, put, spoken

from mars_export import SessionError
from mars_export.runtime.decode.backend import StepOutput
from mars_export.runtime.decode.limits import Limits as Bounds
from mars_export.runtime.decode.prefix import PrefixCache
from mars_export.runtime.decode.schedule import Schedule, run
from mars_export.runtime.decode.sequence import Sequence


@pytest.mark.parametrize("reproducible_slots", [1, 2, None])
def test_a_cancelled_row_leaves_what_is_final(reproducible_slots: int | None) -> None:
    store, backend = PrefixCache(PLENTY, reproducible_slots), Strict(reproducible_slots)
    schedule = Schedule(backend, BLOCK, MASK, Bounds(2, prefill_tokens=8))
    row = Sequence(0, SYSTEM, greedy(50), (), prefix_handle=store.handle())
    schedule.add(row)
    for _ in range(3):
        outcomes(schedule)  # in the middle of its prompt
    row.finish_reason = "cancelled"
    outcomes(schedule)
    [again] = spoken(backend, store, [(SYSTEM, greedy(30))])
    [alone] = spoken(Strict(reproducible_slots), None, [(SYSTEM, greedy(30))])
    assert again.stats.cached_tokens == 24
    assert again.tokens == alone.tokens


class Failing(Strict):
    """Writes nonsense and fails in its nth step."""

    def __init__(self, nth: int) -> None:
        super().__init__(1)
        self.left = nth

    def step(self, cache: Any, first: int, *rest: Any) -> StepOutput:
        output = super().step(cache, first, *rest)
        self.left -= 1
        if self.left == 0:
            cache.entries[first] = 4
            raise SessionError("the device is gone")
        return output


@pytest.mark.parametrize("nth", [1, 2, 5, 6, 7])
def test_a_failed_row_leaves_nothing_of_its_last_state(nth: int) -> None:
    store, backend = PrefixCache(PLENTY, 1), Failing(nth)
    row = Sequence(0, SYSTEM, greedy(20), (), prefix_handle=store.handle())
    schedule = Schedule(backend, BLOCK, MASK, Bounds(1, prefill_tokens=8))
    errors = [event.error for events in run(schedule, [row]) for event in events if event.error]
    assert len(errors) == 1
    held = [entry.saved.data for entry in store._entries.values()]
    assert all(data[:40].tolist() == SYSTEM for data in held), "saved before it failed, and unharmed"
    [again] = spoken(Strict(1), store, [(SYSTEM, greedy(20))])
    [alone] = spoken(Strict(1), None, [(SYSTEM, greedy(20))])
    assert again.tokens == alone.tokens


def test_a_row_that_can_not_load_reads_its_prompt() -> None:
    store, backend = PrefixCache(PLENTY, 1), FakeBackend(chaotic)
    spoken(backend, store, [(SYSTEM, greedy())])

    class NoLoad(FakeCache):
        def load(self, row: int, saved: np.ndarray, length: int) -> None:  # noqa: ARG002
            self.entries[row, : length // 2] = 9
            raise MemoryError

    backend.new_cache = NoLoad  # type: ignore[method-assign, assignment]
    [row] = spoken(backend, store, [(SYSTEM, greedy(9))])
    assert row.stats.cached_tokens == 0
    assert row.tokens == spoken(FakeBackend(chaotic), None, [(SYSTEM, greedy(9))])[0].tokens


def test_threads_share_one_store() -> None:
    store, expected, wrong = PrefixCache(8 * 400, 1), {}, []
    prompts = [[*SYSTEM[: 10 + 3 * (i % 5)], i % 9 + 1, i % 4 + 1] for i in range(12)]
    for i, prompt in enumerate(prompts):
        expected[i] = spoken(FakeBackend(chaotic), None, [(prompt, greedy(8))])[0].tokens

    def work(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for _ in range(40):
                picks = [draw.randrange(12) for _ in range(3)]
                rows = spoken(Strict(1), store, [(prompts[i], greedy(8)) for i in picks], marks=(10,))
                wrong.extend(i for i, row in zip(picks, rows, strict=True) if row.tokens != expected[i])
                if store.stats.num_bytes > store.budget:
                    wrong.append(-1)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert store.stats.hits > 100
    assert store.stats.num_bytes == sum(entry.num_bytes for entry in store._entries.values())


def test_an_entry_that_goes_while_it_is_loaded_is_whole() -> None:
    store = PrefixCache(8 * 60, 1)
    spoken(FakeBackend(chaotic), store, [(SYSTEM, greedy())])

    class Evicting(FakeCache):
        def load(self, row: int, saved: np.ndarray, length: int) -> None:
            put(store, [9] * 60)
            assert found(store, SYSTEM) == 0
            super().load(row, saved, length)

    backend = FakeBackend(chaotic)
    backend.new_cache = Evicting  # type: ignore[method-assign, assignment]
    [row] = spoken(backend, store, [(SYSTEM, greedy(9))])
    assert row.stats.cached_tokens == 39
    assert row.tokens == spoken(FakeBackend(chaotic), None, [(SYSTEM, greedy(9))])[0].tokens
