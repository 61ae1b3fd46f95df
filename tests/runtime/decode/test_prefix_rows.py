"""Rows over a fake, which say with a store of saved prefixes what they say without it, and read less."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.chaos import BLOCK, chaotic
from support.fake import MASK, FakeBackend
from support.loops import outcomes
from support.prefixes import PLENTY, SYSTEM, Strict, greedy, spoken

from mars_export import GenerationConfig
from mars_export.runtime.decode.budget import KvBudget
from mars_export.runtime.decode.limits import Limits as Bounds
from mars_export.runtime.decode.prefix import PrefixCache
from mars_export.runtime.decode.schedule import Schedule, run
from mars_export.runtime.decode.sequence import Sequence

CONFIGS = st.builds(
    GenerationConfig,
    tau=st.sampled_from([None, None, 0.5, 1.0]),
    max_new_tokens=st.integers(1, 14),
    masks=st.sampled_from(["auto", "full", 0, 1, 2]),
    eos_ids=st.sampled_from([(), (3,)]),
    cache_salt=st.sampled_from(["", "", "", "b"]),
)
TURNS = st.lists(
    st.tuples(st.integers(0, 5), st.lists(st.integers(1, 3), min_size=1, max_size=12), CONFIGS),
    min_size=1,
    max_size=12,
)


@settings(max_examples=250)
@given(
    turns=TURNS,
    reproducible_slots=st.sampled_from([None, 1, 2, 3]),
    piece=st.integers(1, 9),
    max_rows=st.integers(1, 4),
    budget=st.sampled_from([200, 600, PLENTY]),
    batch=st.integers(1, 3),
    cache_block=st.sampled_from([1, 1, 2, 5]),
)
def test_conversations_say_the_same_with_a_store(
    turns: list[tuple[int, list[int], GenerationConfig]],
    reproducible_slots: int | None,
    piece: int,
    max_rows: int,
    budget: int,
    batch: int,
    cache_block: int,
) -> None:
    """Each turn goes on from any earlier conversation, whole or cut in its middle."""
    store = PrefixCache(budget, reproducible_slots)
    histories: list[list[int]] = [[1, 2, 1, 2, 3, 3, 1, 1, 2]]
    options: dict[str, Any] = {"piece": piece, "max_rows": max_rows, "cache_block": cache_block}
    for at in range(0, len(turns), batch):
        jobs = []
        for pick, more, config in turns[at : at + batch]:
            history = histories[pick % len(histories)]
            cut = len(history) - pick if pick % 2 else len(history)
            jobs.append(([*history[: max(1, cut)], *more], config))
        with_store = spoken(Strict(reproducible_slots), store, jobs, marks=(9,), **options)
        without = spoken(FakeBackend(chaotic), None, jobs, **options)
        for one, other in zip(with_store, without, strict=True):
            assert (one.tokens, one.finish_reason) == (other.tokens, other.finish_reason)
            assert one.stats.cached_tokens < one.stats.prompt_tokens
            if reproducible_slots is None:
                assert one.stats.cached_tokens % piece == 0
            assert one.stats.prefill_forwards <= other.stats.prefill_forwards
        histories += [seq.tokens for seq in with_store]
        assert store.stats.num_bytes <= budget
    assert store.stats.hit_tokens <= store.stats.query_tokens
    assert store.stats.failed == 0


def test_a_long_entry_does_not_widen_rows_beyond_their_memory() -> None:
    store, long = PrefixCache(PLENTY, 1), [*SYSTEM, *range(1, 900)]
    spoken(FakeBackend(chaotic), store, [(long, greedy())], piece=256)
    for num_bytes, cached in ((None, 40), (8 * 2 * 2000, 40), (8 * 2 * 256, 0)):
        backend = FakeBackend(chaotic)
        budget = KvBudget(2, num_bytes, 8, backend.max_capacity, by_row=False)
        seq = Sequence(0, [*SYSTEM, 999], greedy(), (), prefix_handle=store.handle())
        budget.check(seq)
        schedule = Schedule(backend, BLOCK, MASK, Bounds(2, prefill_tokens=64), budget=budget)
        for _ in run(schedule, [seq]):
            used = max(held.capacity for held in backend.caches)
            assert num_bytes is None or 8 * 2 * used <= num_bytes
        assert seq.stats.cached_tokens == cached
        assert seq.tokens == spoken(FakeBackend(chaotic), None, [(seq.tokens[:41], greedy())])[0].tokens


def test_a_row_with_many_pending_tokens_keeps_its_neighbour_within_the_memory() -> None:
    backend = FakeBackend(lambda known, _: (1 + len(known) % 9, 0.9))
    budget = KvBudget(2, 8 * 2 * 384, 8, backend.max_capacity, by_row=False)
    seqs = [Sequence(i, [1 + i], greedy(200, tau=1.0), ()) for i in range(2)]
    assert all(budget.entries(seq) <= 384 for seq in seqs)
    schedule = Schedule(backend, BLOCK, MASK, Bounds(2, prefill_tokens=256), budget=budget)
    schedule.add(seqs[0])
    while not schedule.is_idle:
        outcomes(schedule)
        if seqs[0].stats.tokens == 195 and not seqs[1].stats.tokens:
            schedule.add(seqs[1])
        if seqs[1].stats.tokens == 2:
            seqs[1].tokens += [1] * 190  # as a grammar that forces a long text
            seqs[1].stats.tokens += 190
        assert max(held.capacity for held in backend.caches) <= 384
    assert [seq.stats.tokens for seq in seqs] == [200, 200]


def test_one_slot_steps_give_no_entries_where_they_are_not_reproducible() -> None:
    store, backend = PrefixCache(PLENTY, 2), Strict(2)
    [first] = spoken(backend, store, [(SYSTEM, greedy(12, tau=1.0))])
    [second] = spoken(backend, store, [([*first.tokens, 5, 6], greedy())])
    assert second.stats.cached_tokens == len(SYSTEM)
