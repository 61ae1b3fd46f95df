"""The store of saved prefixes: the longest beginning is found, and memory stays under its budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.prefixes import GROUP, PLENTY, Ids, found, put

from mars_export.runtime.decode.prefix import Prefixes, Saved


def saver(made: list[Ids], ids: Sequence[int]) -> Callable[[], Saved]:
    def copy() -> Saved:
        made.append(tuple(ids))
        return Saved(tuple(ids), len(ids))

    return copy


IDS = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)


@given(
    steps=st.lists(st.tuples(IDS, st.booleans(), st.sampled_from(["", "salt"])), max_size=30),
    budget=st.integers(8, 400),
)
def test_the_longest_common_beginning_is_found_and_memory_is_bounded(
    steps: list[tuple[Ids, bool, str]], budget: int
) -> None:
    store = Prefixes(budget, 1)
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


def test_least_recently_used_goes_first() -> None:
    store = Prefixes(8 * 9, 1)
    for first in (1, 2, 3):
        put(store, [first] * 3)
    assert found(store, [1, 1, 9]) == 2
    put(store, [4] * 3)
    assert [found(store, [i] * 3) for i in (1, 2, 3, 4)] == [3, 0, 3, 3]
    assert store.stats.evicted == 1


def test_a_longer_entry_takes_the_place_of_its_beginning() -> None:
    store = Prefixes(PLENTY, 1)
    put(store, [1, 2])
    put(store, [1, 2, 3])
    put(store, [1])  # is there already
    assert (store.stats.entries, store.stats.num_bytes, store.stats.saved) == (1, 24, 2)
    assert store.stats.evicted == 0


def test_the_end_of_the_system_message_is_used_with_what_it_is_in() -> None:
    store = Prefixes(8 * 12, 1)
    put(store, [5, 5, 5, 5], fixed=True)
    put(store, [5, 5, 5, 5, 1])
    for other in range(6, 20):
        put(store, [other] * 3)  # presses the oldest out
        assert store.match(GROUP, [5, 5, 5, 5, 2], marks=[4])
    assert found(store, [5] * 4) == 4
    assert found(store, [5, 5, 5, 5, 1]) == 4, "the longer one has gone"


def test_what_has_no_room_is_not_even_copied() -> None:
    store, made = Prefixes(30, 1), []
    put(store, [1, 2])
    store.save(GROUP, [1, 2, 3, 4], 32, saver(made, [1, 2, 3, 4]))
    assert not made
    assert found(store, [1, 2, 3]) == 2


def test_a_copy_that_fails_is_counted_and_costs_nothing() -> None:
    store = Prefixes(40, 1)

    def fails() -> Saved:
        raise MemoryError

    store.save(GROUP, [1, 2], 16, fails)
    assert (store.stats.failed, store.stats.num_bytes, store.stats.entries) == (1, 0, 0)
    put(store, [1, 2, 3, 4, 5])
    assert found(store, [1, 2, 3, 4, 5]) == 5


def test_an_interrupt_of_a_copy_is_not_swallowed_and_gives_its_room_back() -> None:
    store = Prefixes(40, 1)

    def stopped() -> Saved:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(GROUP, [1, 2], 16, stopped)
    assert store.stats.num_bytes == 0


def test_forgetting_gives_all_memory_back() -> None:
    store = Prefixes(PLENTY, 1)
    for i in range(5):
        put(store, [i, i], (str(i), 1))
    store.clear()
    assert (store.stats.entries, store.stats.num_bytes, store._sorted) == (0, 0, {})
