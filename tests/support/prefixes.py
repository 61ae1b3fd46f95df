"""A store of saved prefixes whose data are the ids, and sequences over a fake whose entries are the tokens: a
wrong one shows in what is said.
"""

from __future__ import annotations

from collections import abc
from typing import Any

import numpy as np

from mars_export import GenerationConfig
from mars_export.runtime.decode.backend import Backend
from mars_export.runtime.decode.limits import Limits as Bounds
from mars_export.runtime.decode.prefix import PrefixCache, Saved
from mars_export.runtime.decode.schedule import Schedule, run
from mars_export.runtime.decode.sequence import Sequence
from mars_export.runtime.decode.speculation.cost import Cost
from support.chaos import BLOCK, chaotic
from support.fake import MASK, FakeBackend, FakeCache
from support.loops import planner_of

PLENTY = 1 << 30
GROUP = ("", 1)
Ids = tuple[int, ...]


def put(
    store: PrefixCache, ids: abc.Sequence[int], group: tuple[str, int] = GROUP, *, fixed: bool = False
) -> None:
    store.save(group, ids, 8 * len(ids), lambda: Saved(tuple(ids), len(ids)), fixed=fixed)


def found(store: PrefixCache, ids: abc.Sequence[int], group: tuple[str, int] = GROUP) -> int:
    match = store.match(group, ids)
    if match is None:
        return 0
    saved, length = match
    assert saved.data[:length] == tuple(ids[:length])
    return length


class Poisoned(FakeCache):
    """Overwrites all that is behind what may be saved: nothing of it may ever be seen again."""

    def save(self, seq: int, length: int) -> np.ndarray:
        kept = super().save(seq, length)
        behind = np.full(self.capacity - length, -1)
        return np.concatenate([kept, behind])

    def load(self, seq: int, saved: np.ndarray, length: int) -> None:
        self.entries[seq, length:] = -1
        self.entries[seq, :length] = saved[:length]


class Strict(FakeBackend):
    """What lies behind a sequence's beginning is -1 after a hit; `reproducible_slots` as told."""

    def __init__(
        self, reproducible_slots: int | None, capacity: int = 10**6, most: int | None = None
    ) -> None:
        super().__init__(chaotic, capacity, most)
        self.reproducible_slots = reproducible_slots

    def new_cache(self, num_rows: int) -> FakeCache:
        self.caches.append(Poisoned(num_rows))
        return self.caches[-1]


def spoken(
    backend: Backend,
    store: PrefixCache | None,
    jobs: abc.Sequence[tuple[abc.Sequence[int], GenerationConfig]],
    *,
    piece: int = 8,
    max_rows: int = 4,
    cache_block: int = 1,
    marks: abc.Sequence[int] = (),
) -> list[Sequence]:
    seqs = [
        Sequence(
            i,
            ids,
            config,
            (),
            prefix_handle=store.handle(config.cache_salt, marks) if store is not None else None,
        )
        for i, (ids, config) in enumerate(jobs)
    ]
    limits = Bounds(max_rows, prefill_tokens=piece, cache_block=cache_block)
    schedule = Schedule(backend, BLOCK, MASK, limits, planner_of(Cost(((1, 1.0),))))
    for events in run(schedule, seqs):
        for event in events:
            assert event.error is None, event.error
    return seqs


def greedy(count: int = 4, **changes: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=count, eos_ids=()).with_values(**changes)


SYSTEM = [1 + i % 7 for i in range(40)]
