"""Saved prefixes: what a hit restores is what reading the prompt gives, and memory stays under the budget."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.agreement import LOOPS, MAIN
from support.chaos import BLOCK, chaotic
from support.fake import MASK, FakeBackend, FakeCache
from support.firm import export_firm

from mars_export.runtime import Batcher, Commit, GenerationConfig, Limits, Session, SessionError
from mars_export.runtime.decode.backend import Backend, StepOutput
from mars_export.runtime.decode.batch import Batch
from mars_export.runtime.decode.blocks import BlockSchedule
from mars_export.runtime.decode.budget import KvBudget
from mars_export.runtime.decode.cost import Cost
from mars_export.runtime.decode.policy import Policy
from mars_export.runtime.decode.prefix import Prefixes, Saved, Stored
from mars_export.runtime.decode.row import Row
from mars_export.runtime.decode.schedule import Limits as Bounds
from mars_export.runtime.decode.schedule import Schedule, run

PLENTY = 1 << 30
GROUP = ("", 1)
Ids = tuple[int, ...]


def saver(made: list[Ids], ids: Sequence[int]) -> Callable[[], Saved]:
    def copy() -> Saved:
        made.append(tuple(ids))
        return Saved(tuple(ids), len(ids))

    return copy


def put(store: Prefixes, ids: Sequence[int], group: tuple[str, int] = GROUP, *, fixed: bool = False) -> None:
    store.save(group, ids, 8 * len(ids), lambda: Saved(tuple(ids), len(ids)), fixed=fixed)


def found(store: Prefixes, ids: Sequence[int], group: tuple[str, int] = GROUP) -> int:
    match = store.match(group, ids)
    if match is None:
        return 0
    saved, length = match
    assert saved.data[:length] == tuple(ids[:length])
    return length


# --- the store ---

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


# --- rows over a fake, whose entries are the tokens: a wrong one shows in what is said ---


class Poisoned(FakeCache):
    """Overwrites all that is behind what may be saved: nothing of it may ever be seen again."""

    def save(self, row: int, length: int) -> np.ndarray:
        kept = super().save(row, length)
        behind = np.full(self.capacity - length, -1)
        return np.concatenate([kept, behind])

    def load(self, row: int, saved: np.ndarray, length: int) -> None:
        self.entries[row, length:] = -1
        self.entries[row, :length] = saved[:length]


class Strict(FakeBackend):
    """What lies behind a row's beginning is -1 after a hit; `firm_slots` as told."""

    def __init__(self, firm_slots: int | None, capacity: int = 10**6, most: int | None = None) -> None:
        super().__init__(chaotic, capacity, most)
        self.firm_slots = firm_slots

    def new_cache(self, num_rows: int) -> FakeCache:
        self.caches.append(Poisoned(num_rows))
        return self.caches[-1]


def spoken(
    backend: Backend,
    store: Prefixes | None,
    jobs: Sequence[tuple[Sequence[int], GenerationConfig]],
    *,
    piece: int = 8,
    max_rows: int = 4,
    commit: Commit | None = None,
    marks: Sequence[int] = (),
) -> list[Row]:
    rows = [
        Row(i, ids, config, (), stem=store.stem(config.cache_salt, marks) if store is not None else None)
        for i, (ids, config) in enumerate(jobs)
    ]
    limits = Bounds(max_rows, prefill_tokens=piece)
    schedule = (
        Schedule(backend, BLOCK, MASK, limits, Policy(lambda: Cost(((1, 1.0),))))
        if commit is None
        else BlockSchedule(backend, BLOCK, MASK, limits, commit.cache_block)
    )
    for events in run(schedule, rows):
        for event in events:
            assert event.error is None, event.error
    return rows


CONFIGS = st.builds(
    GenerationConfig,
    tau=st.sampled_from([None, None, 0.5, 1.0]),
    max_new_tokens=st.integers(1, 14),
    window=st.sampled_from(["auto", "full", 1, 2, 3]),
    eos_ids=st.sampled_from([(), (3,)]),
    cache_salt=st.sampled_from(["", "", "", "b"]),
)
TURNS = st.lists(
    st.tuples(st.integers(0, 5), st.lists(st.integers(1, 3), min_size=1, max_size=12), CONFIGS),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=250)
@given(
    turns=TURNS,
    firm_slots=st.sampled_from([None, 1, 2, 3]),
    piece=st.integers(1, 9),
    max_rows=st.integers(1, 4),
    budget=st.sampled_from([200, 600, PLENTY]),
    batch=st.integers(1, 3),
    block=st.sampled_from([None, None, 1, 5]),
    stored=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=20), max_size=3),
)
def test_conversations_say_the_same_with_a_store(
    turns: list[tuple[int, list[int], GenerationConfig]],
    firm_slots: int | None,
    piece: int,
    max_rows: int,
    budget: int,
    batch: int,
    block: int | None,
    stored: list[list[int]],
) -> None:
    """Each turn goes on from any earlier conversation, or from a prefix of the bundle, whole or cut in its
    middle.
    """
    store, commit = Prefixes(budget, firm_slots), None if block is None else Commit("block", block)
    histories: list[list[int]] = [[1, 2, 1, 2, 3, 3, 1, 1, 2]]
    for ids in stored:  # of the bundle
        ids = ids if firm_slots is not None else ids[: len(ids) // piece * piece]
        if ids:
            store.adopt(("", piece if firm_slots is None else 1), ids, Stored(np.array(ids), len(ids)))
            histories.append(ids)
    options: dict[str, Any] = {"piece": piece, "max_rows": max_rows, "commit": commit}
    for at in range(0, len(turns), batch):
        jobs = []
        for pick, more, config in turns[at : at + batch]:
            history = histories[pick % len(histories)]
            cut = len(history) - pick if pick % 2 else len(history)
            if block is not None and config.exact:
                config = config.with_values(tau=0.5)
            jobs.append(([*history[: max(1, cut)], *more], config))
        with_store = spoken(Strict(firm_slots), store, jobs, marks=(9,), **options)
        without = spoken(FakeBackend(chaotic), None, jobs, **options)
        for one, other in zip(with_store, without, strict=True):
            assert (one.tokens, one.finish_reason) == (other.tokens, other.finish_reason)
            assert one.stats.cached_tokens < one.stats.prompt_tokens
            if firm_slots is None:
                assert one.stats.cached_tokens % piece == 0
            assert one.stats.prefill_forwards <= other.stats.prefill_forwards
        histories += [row.tokens for row in with_store]
        assert store.stats.num_bytes <= budget
    assert store.stats.hit_tokens <= store.stats.query_tokens
    assert store.stats.failed == 0


def greedy(count: int = 4, **changes: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=count, eos_ids=()).with_values(**changes)


SYSTEM = [1 + i % 7 for i in range(40)]


def fed(backend: FakeBackend) -> int:
    return sum(step.rows * step.slots for step in backend.steps if step.slots > 2 * BLOCK)


def test_ten_requests_with_one_system_prompt_read_it_once() -> None:
    store, backend = Prefixes(PLENTY, 1), FakeBackend(chaotic)
    jobs = [([*SYSTEM, 8, i + 1, 9], greedy()) for i in range(10)]
    rows = spoken(backend, store, jobs, piece=64, max_rows=10)
    assert [row.stats.cached_tokens for row in rows] == [0, *[41] * 9]
    assert sum(step.slots > 30 for step in backend.steps) == 1
    assert (store.stats.queries, store.stats.hits) == (10, 9)
    assert (store.stats.query_tokens, store.stats.hit_tokens) == (430, 9 * 41)


def test_a_second_turn_reads_only_what_is_new() -> None:
    store, backend = Prefixes(PLENTY, 1), FakeBackend(chaotic)
    [first] = spoken(backend, store, [(SYSTEM, greedy(12))])
    [second] = spoken(backend, store, [([*first.tokens, 5, 6, 7], greedy())])
    # All but the last accepted tokens, which no step had fed yet.
    assert len(first.tokens) - BLOCK - 2 <= second.stats.cached_tokens < len(first.tokens)
    assert second.stats.prefill_forwards < first.stats.prefill_forwards


@pytest.mark.parametrize("firm_slots", [None, 1, 2])
def test_prompts_that_are_read_in_turns_say_the_same(firm_slots: int | None) -> None:
    """A short prompt comes into a long one's reading, and begins with what is saved."""
    store = Prefixes(PLENTY, firm_slots)
    long, short = [1 + i * i % 9 for i in range(150)], [*SYSTEM, 5, 3]
    jobs = [([*long, 2], greedy(9)), (short, greedy(5)), (long, greedy(7)), ([*short, 8], greedy(5))]
    wanted = [spoken(Strict(firm_slots), None, [job])[0].tokens for job in jobs]
    for _ in range(3):
        backend = Strict(firm_slots)
        rows = spoken(backend, store, jobs)
        assert [row.tokens for row in rows] == wanted
    assert all(
        row.stats.cached_tokens >= len(prompt) - 9 for row, (prompt, _) in zip(rows, jobs, strict=True)
    )
    alone = spoken(first := Strict(firm_slots), None, jobs)
    assert [row.tokens for row in alone] == wanted
    reads = [int(step.kv_length[0]) for step in first.steps if step.slots == 8]
    assert reads != sorted(reads), "two were read in turns"


def test_a_long_entry_does_not_widen_rows_beyond_their_memory() -> None:
    store, long = Prefixes(PLENTY, 1), [*SYSTEM, *range(1, 900)]
    spoken(FakeBackend(chaotic), store, [(long, greedy())], piece=256)
    for num_bytes, cached in ((None, 40), (8 * 2 * 2000, 40), (8 * 2 * 256, 0)):
        backend = FakeBackend(chaotic)
        budget = KvBudget(2, num_bytes, 8, backend.max_capacity)
        row = Row(0, [*SYSTEM, 999], greedy(), (), stem=store.stem())
        budget.check(row)
        schedule = Schedule(backend, BLOCK, MASK, Bounds(2, prefill_tokens=64), budget=budget)
        for _ in run(schedule, [row]):
            used = max(held.capacity for held in backend.caches)
            assert num_bytes is None or 8 * 2 * used <= num_bytes
        assert row.stats.cached_tokens == cached
        assert row.tokens == spoken(FakeBackend(chaotic), None, [(row.tokens[:41], greedy())])[0].tokens


def test_salts_never_share() -> None:
    store, backend = Prefixes(PLENTY, 1), FakeBackend(chaotic)
    cached = [
        spoken(backend, store, [(SYSTEM, greedy(cache_salt=salt))])[0].stats.cached_tokens
        for salt in ("", "a", "b", "a")
    ]
    assert cached == [0, 0, 0, len(SYSTEM) - 1]


def test_sizes_of_pieces_never_share_where_entries_depend_on_them() -> None:
    store, backend = Prefixes(PLENTY, None), Strict(None)
    cached = [
        spoken(backend, store, [(SYSTEM, greedy())], piece=piece)[0].stats.cached_tokens
        for piece in (8, 16, 8, 16, 5)
    ]
    assert cached == [0, 0, 32, 32, 0]


def test_one_slot_steps_give_no_entries_where_they_are_not_firm() -> None:
    store, backend = Prefixes(PLENTY, 2), Strict(2)
    [first] = spoken(backend, store, [(SYSTEM, greedy(12, tau=1.0))])
    [second] = spoken(backend, store, [([*first.tokens, 5, 6], greedy())])
    assert second.stats.cached_tokens == len(SYSTEM)


@pytest.mark.parametrize("firm_slots", [1, 2, None])
def test_a_cancelled_row_leaves_what_is_final(firm_slots: int | None) -> None:
    store, backend = Prefixes(PLENTY, firm_slots), Strict(firm_slots)
    schedule = Schedule(backend, BLOCK, MASK, Bounds(2, prefill_tokens=8))
    row = Row(0, SYSTEM, greedy(50), (), stem=store.stem())
    schedule.add(row)
    for _ in range(3):
        schedule.step()  # in the middle of its prompt
    row.finish_reason = "cancelled"
    schedule.step()
    [again] = spoken(backend, store, [(SYSTEM, greedy(30))])
    [alone] = spoken(Strict(firm_slots), None, [(SYSTEM, greedy(30))])
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
    store, backend = Prefixes(PLENTY, 1), Failing(nth)
    row = Row(0, SYSTEM, greedy(20), (), stem=store.stem())
    schedule = Schedule(backend, BLOCK, MASK, Bounds(1, prefill_tokens=8))
    errors = [event.error for events in run(schedule, [row]) for event in events if event.error]
    assert len(errors) == 1
    held = [entry.saved.data for entry in store._entries.values()]
    assert all(data[:40].tolist() == SYSTEM for data in held), "saved before it failed, and unharmed"
    [again] = spoken(Strict(1), store, [(SYSTEM, greedy(20))])
    [alone] = spoken(Strict(1), None, [(SYSTEM, greedy(20))])
    assert again.tokens == alone.tokens


def test_a_row_that_can_not_load_reads_its_prompt() -> None:
    store, backend = Prefixes(PLENTY, 1), FakeBackend(chaotic)
    spoken(backend, store, [(SYSTEM, greedy())])

    class NoLoad(FakeCache):
        def load(self, row: int, saved: np.ndarray, length: int) -> None:  # noqa: ARG002
            self.entries[row, : length // 2] = 9
            raise MemoryError

    backend.new_cache = NoLoad  # type: ignore[method-assign, assignment]
    [row] = spoken(backend, store, [(SYSTEM, greedy(9))])
    assert row.stats.cached_tokens == 0
    assert row.tokens == spoken(FakeBackend(chaotic), None, [(SYSTEM, greedy(9))])[0].tokens


@pytest.mark.parametrize("capacity", [40, 41, 44, 50])
def test_the_end_of_the_context_is_where_it_is_without_a_store(capacity: int) -> None:
    store = Prefixes(PLENTY, 1)
    for _ in range(3):
        [one] = spoken(Strict(1, capacity), store, [(SYSTEM, greedy(30))])
        [other] = spoken(Strict(1, capacity), None, [(SYSTEM, greedy(30))])
        assert (one.tokens, one.finish_reason) == (other.tokens, other.finish_reason)
        assert one.finish_reason == "capacity"
    assert one.stats.cached_tokens == 39
    [full] = spoken(Strict(1, capacity), store, [(one.tokens[:capacity], greedy(30))])
    assert full.tokens == spoken(Strict(1, capacity), None, [(one.tokens[:capacity], greedy(30))])[0].tokens


def test_memory_stays_under_the_budget_for_2000_conversations() -> None:
    draw, budget = random.Random(3), 8 * 700
    store, histories, most = Prefixes(budget, 1), [SYSTEM[:20]], 0
    for _ in range(2000):
        history = draw.choice(histories)[: draw.randint(1, 90)]
        jobs = [
            (
                [*history, *(draw.randint(1, 9) for _ in range(draw.randint(1, 30)))],
                greedy(draw.randint(1, 6)),
            )
        ]
        histories.append(spoken(FakeBackend(chaotic), store, jobs, piece=32, marks=(20,))[0].tokens)
        histories = histories[-20:]
        stats = store.stats
        held = sum(8 * entry.saved.length for entry in store._entries.values())
        assert held == stats.num_bytes <= budget
        most = max(most, held)
    assert most > budget * 0.8, "the budget is used, too"
    assert stats.evicted > 500
    assert stats.hits > 1000


def test_threads_share_one_store() -> None:
    store, expected, wrong = Prefixes(8 * 400, 1), {}, []
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
    store = Prefixes(8 * 60, 1)
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


# --- sessions over ONNX Runtime: the very bits ---


@pytest.fixture(scope="module")
def firm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Bundles by precision of a model whose entries do not depend on the size of a step."""
    root = tmp_path_factory.mktemp("firm")
    return cache(lambda kind: export_firm(kind, root))


def twins(path: Path, cache_bytes: int = PLENTY) -> tuple[Session, Session]:
    return (
        Session.open(path, threads=1, cache_bytes=cache_bytes),
        Session.open(path, threads=1, cache_bytes=0),
    )


def asked(seed: int) -> list[tuple[list[int], GenerationConfig]]:
    """Turns of a few conversations with one beginning."""
    draw = random.Random(seed)
    system = [draw.randrange(250) for _ in range(30)]
    return [
        (
            system[: draw.choice((20, 30))] + [draw.randrange(250) for _ in range(draw.randint(1, 25))],
            GenerationConfig(
                max_new_tokens=draw.randint(1, 12), eos_ids=(), tau=draw.choice((None, 0.4, 0.8, 1.0))
            ),
        )
        for _ in range(5)
    ]


@pytest.mark.parametrize("kind", ["fp32", "w8a8", "fp32 own", "w8a8 own"])
def test_entries_of_firm_steps_have_the_same_bits(kind: str, firm: Callable[[str], Path]) -> None:
    """Read in pieces of any sizes from two slots on, with masks behind or not, beside other rows or not;
    where heads share their keys and where each has its own.
    """
    backend = Session.open(firm(kind), threads=2, cache_bytes=0).backend
    assert backend.firm_slots == 2
    draw = random.Random(5)
    ids = [draw.randrange(250) for _ in range(150)]

    def entries(sizes: Sequence[int], rows: int, masks: int, capacity: int) -> list[np.ndarray]:
        held, at = backend.new_cache(rows), 0
        held.reserve(capacity)
        for size in sizes:
            size = min(size, len(ids) - at)
            others = [[draw.randrange(250) for _ in range(size + masks)] for _ in range(rows - 1)]
            slots = np.array([*others, [*ids[at : at + size], *[tiny.MASK] * masks]])
            held.reserve(at + size + masks)
            index = np.full((rows, 1), size - 1)
            backend.step(held, 0, slots, np.full(rows, at), index, False)
            at += size
        return held.save(rows - 1, len(ids) - 1)  # type: ignore[no-any-return]

    whole = entries([150], 1, 0, 0)
    for sizes, rows, masks, capacity in [
        ([64, 64, 22], 1, 0, 0),
        ([2] * 75, 1, 0, 400),
        ([3] * 50, 2, 0, 0),
        ([7] * 22, 1, 5, 0),
        ([37, 41, 72], 3, 2, 300),
        ([140, 5, 5], 1, 11, 0),
        *(
            ([draw.randint(2, 30) for _ in range(75)], draw.randint(1, 3), draw.randint(0, 6), 0)
            for _ in range(6)
        ),
    ]:
        for a, b in zip(whole, entries(sizes, rows, masks, capacity), strict=True):
            assert np.array_equal(a[:, :148], b[:, :148]), (sizes, rows, masks)


def test_elsewhere_entries_depend_on_the_pieces(
    firm: Callable[[str], Path], bundles: Callable[[str], Path]
) -> None:
    for path in (firm("int8"), firm("fp16"), bundles(MAIN)):
        assert Session.open(path, threads=1).backend.firm_slots is None


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kind", "piece"), [("fp32", 7), ("fp32", 256), ("w8a8", 16), ("int8", 7), ("narrow", 7)]
)
def test_answers_are_bit_for_bit_those_without_a_store(
    seed: int,
    loop: str,
    kind: str,
    piece: int,
    firm: Callable[[str], Path],
    bundles: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mars_export.runtime.decode.schedule.PREFILL_CHUNK", piece)
    one, other = twins(bundles(MAIN) if kind == "narrow" else firm(kind))
    history: list[int] = []
    for ids, config in asked(seed):
        if loop != "cursor":
            config = config.with_values(tau=0.5)
        for prompt in (ids, history + ids):
            had = one.generate(prompt, config, commit=LOOPS[loop])
            wanted = other.generate(prompt, config, commit=LOOPS[loop])
            assert had.token_ids == wanted.token_ids
            assert had.confidences == wanted.confidences, "not only close"
        history = (history + ids + list(had.token_ids))[:200]
    assert one.prefix_stats.hits >= 6
    assert other.prefix_stats.queries == 0


def test_batches_say_the_same_and_share(firm: Callable[[str], Path]) -> None:
    one, other = twins(firm("fp32"))
    for seed in range(3):
        jobs = asked(seed)
        prompts, configs = [ids for ids, _ in jobs], [config for _, config in jobs]
        had, wanted = one.generate_batch(prompts, configs), other.generate_batch(prompts, configs)
        assert [c.token_ids for c in had] == [c.token_ids for c in wanted]
        assert sum(c.stats.cached_tokens > 15 for c in had) == 4, "all but the first"


def test_stream_generate_and_batcher_share(firm: Callable[[str], Path]) -> None:
    session, plain = twins(firm("fp32"))
    prompt, config = list(range(1, 80)), GenerationConfig(max_new_tokens=10, eos_ids=())
    wanted = plain.generate(prompt, config).token_ids
    assert session.generate(prompt, config).stats.cached_tokens == 0
    stream = session.stream(prompt, config)
    for _ in stream:
        pass
    with Batcher(session, Limits(max_rows=2)) as batcher:
        done = batcher.submit(prompt, config).result()
    assert stream.completion.token_ids == done.token_ids == wanted
    assert (stream.stats.cached_tokens, done.stats.cached_tokens) == (77, 77), (
        "two are fed: one slot is not firm"
    )
    assert done.stats.to_dict()["cached_tokens"] == 77
    session.forget_prefixes()
    assert session.prefix_stats.num_bytes == 0
    assert session.generate(prompt, config).stats.cached_tokens == 0


def test_no_store_costs_nothing(firm: Callable[[str], Path]) -> None:
    _, plain = twins(firm("fp32"))
    row, _ = plain.new_row(0, [1, 2, 3], GenerationConfig())
    assert row.stem is None


def test_nonsense_is_refused(bundles: Callable[[str], Any]) -> None:
    with pytest.raises(SessionError, match="cache_bytes must be 0 or more"):
        Session.open(bundles(MAIN), cache_bytes=-1)
    with pytest.raises(SessionError, match="cache_salt must be a text"):
        GenerationConfig(cache_salt=3)  # type: ignore[arg-type]


def test_memory_for_saved_entries_is_a_small_share(
    bundles: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for free, budget in ((None, 256 << 20), (1 << 30, 64 << 20), (1 << 40, 1 << 30), (-5, 0)):
        monkeypatch.setattr("mars_export.runtime.machine.available", lambda free=free: free)
        assert Session.open(bundles(MAIN), threads=1)._prefixes.budget == budget


def test_the_system_message_is_an_entry_of_its_own(firm: Callable[[str], Path]) -> None:
    session, _ = twins(firm("fp32"))
    config = GenerationConfig(max_new_tokens=3)
    for question in ("the man", "an error"):
        session.generate(
            [{"role": "system", "content": "be the inner man"}, {"role": "user", "content": question}], config
        )
    fixed = [entry for entry in session._prefixes._entries.values() if entry.fixed]
    assert session.text is not None
    spelled = session.text.spelled(np.frombuffer(fixed[0].key, ">u4").tolist())
    assert len(fixed) == 1
    assert spelled.endswith("be the inner man<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize("firm_slots", [2, None])
def test_nothing_behind_the_cursor_is_saved(
    firm_slots: int | None, firm: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN everywhere behind the row's cursor before each copy: nothing that was saved has one."""
    monkeypatch.setattr("mars_export.runtime.decode.schedule.PREFILL_CHUNK", 7)
    one, other = twins(firm("fp32"))
    one._prefixes.firm_slots = firm_slots
    keep, kept = Batch.keep, 0

    def poisoned(self: Batch, place: int) -> None:
        nonlocal kept
        behind = slice(self.active[place].cursor, None)
        before = [buffer.array[place, :, behind].copy() for buffer in self.cache.buffers]  # type: ignore[attr-defined]
        for buffer in self.cache.buffers:  # type: ignore[attr-defined]
            buffer.array[place, :, behind] = np.nan
        keep(self, place)
        for buffer, entries in zip(self.cache.buffers, before, strict=True):  # type: ignore[attr-defined]
            buffer.array[place, :, behind] = entries  # 0 * NaN is NaN, behind a mask too
        kept += 1

    monkeypatch.setattr(Batch, "keep", poisoned)
    history: list[int] = []
    for ids, config in asked(7) + asked(8):
        prompt = (history + ids)[:300]
        had = one.generate(prompt, config)
        assert had.confidences == other.generate(prompt, config).confidences
        history = prompt + list(had.token_ids)
        for entry in one._prefixes._entries.values():
            assert all(np.isfinite(array).all() for array in entry.saved.data)
    assert one.prefix_stats.hits >= 8
    assert kept >= 20
