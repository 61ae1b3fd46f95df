"""The store of saved prefixes: the longest beginning is found, and memory stays under its budget."""

from __future__ import annotations

import pytest
from support.prefixes import GROUP, PLENTY, found, put

from mars_export.runtime.decode.prefix import PrefixCache, Saved


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
