"""The store of saved prefixes: the longest beginning is found, and memory stays under its budget."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.prefixes import GROUP, PLENTY, Ids, found, put

from mars_export.runtime.decode.prefix import PrefixCache, Saved

IDS = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)


@given(
    steps=st.lists(st.tuples(IDS, st.booleans(), st.sampled_from(["", "salt"])), max_size=30),
    budget=st.integers(8, 400),
)
def test_the_longest_common_beginning_is_found_and_memory_is_bounded(
    steps: list[tuple[Ids, bool, str]], budget: int
) -> None:
    store = PrefixCache(budget, 1)
    for ids, fixed, salt in steps:
        put(store, ids, (salt, 1), fixed=fixed)
        held = dict(store._entries)
        assert store.stats.num_bytes == sum(e.num_bytes for e in held.values()) <= budget
        assert sorted(key for keys in store._sorted.values() for key in keys) == sorted(k for _, k in held)
        if 8 * len(ids) <= budget:
            assert found(store, ids, (salt, 1)) == len(ids), "what was just saved is there"
        for (group, key), entry in held.items():
            longer = [k for g, k in held if g == group and k != key and k.startswith(key)]
            assert entry.fixed or not longer, (
                "the beginning of a longer entry stays only where it was asked for"
            )
        for probe, _, other in steps:
            texts = [e.saved.data for (group, _), e in held.items() if group == (other, 1)]
            best = max((common(probe, text) for text in texts), default=0)
            assert found(store, probe, (other, 1)) == best


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def test_a_copy_that_fails_is_counted_and_costs_nothing() -> None:
    store = PrefixCache(40, 1)

    def fails() -> Saved:
        raise MemoryError

    store.save(GROUP, [1, 2], 16, fails)
    assert (store.stats.failed, store.stats.num_bytes, store.stats.entries) == (1, 0, 0)
    put(store, [1, 2, 3, 4, 5])
    assert found(store, [1, 2, 3, 4, 5]) == 5


def test_an_interrupt_of_a_copy_is_not_swallowed_and_gives_its_room_back() -> None:
    store = PrefixCache(40, 1)

    def stopped() -> Saved:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(GROUP, [1, 2], 16, stopped)
    assert store.stats.num_bytes == 0


def test_forgetting_gives_all_memory_back() -> None:
    store = PrefixCache(PLENTY, 1)
    for i in range(5):
        put(store, [i, i], (str(i), 1))
    store.clear()
    assert (store.stats.entries, store.stats.num_bytes, store._sorted) == (0, 0, {})
