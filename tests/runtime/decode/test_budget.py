"""Rows of different lengths within one KV budget: who runs beside whom, and who waits how long."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from itertools import count

from support.chaos import BLOCK, chaotic
from support.fake import MASK, FakeBackend, FakeCache
from support.loops import decode, outcomes

from mars_export.runtime.decode.budget import KvBudget
from mars_export.runtime.decode.config import GenerationConfig
from mars_export.runtime.decode.limits import Limits
from mars_export.runtime.decode.schedule import MAX_PASSES, Schedule
from mars_export.runtime.decode.sequence import Sequence
from mars_export.runtime.errors import SessionError

ENTRIES = 8 * 512  # of KV memory
ROWS = 8


def row(index: int, tokens: int, prompt: int = 4, client: str | None = None) -> Sequence:
    config = GenerationConfig(tau=1.0, max_new_tokens=tokens)
    seq = Sequence(index, [1] * prompt, config, ())
    seq.client = client
    return seq


def opened(**limits: int) -> Schedule:
    budget = KvBudget(ROWS, ENTRIES, entry_bytes=1, max_capacity=2 * ENTRIES)
    return Schedule(FakeBackend(chaotic), BLOCK, MASK, Limits(ROWS, **limits), None, budget)


def reserved(schedule: Schedule) -> int:
    return sum(schedule.budget.entries(seq) for seq in schedule.running)


def until(schedule: Schedule, over: Callable[[], bool]) -> int:
    """Iterations until something holds."""
    for n in range(40_000):
        if over():
            return n
        outcomes(schedule)
        assert schedule.num_running <= ROWS
        assert reserved(schedule) <= ENTRIES
    raise AssertionError("waits for ever")


def test_short_requests_flow_while_a_long_one_waits_but_it_is_not_passed_for_ever() -> None:
    """The long one needs nearly all memory. Others pass it, and then it is next."""
    schedule, long = opened(), row(0, 3900)
    schedule.add(row(1, 100))
    outcomes(schedule)
    schedule.add(long)
    short = [row(i, 100) for i in range(2, 100)]
    for each in short:
        schedule.add(each)
    outcomes(schedule)
    assert schedule.num_running == ROWS, "those behind it pass"
    assert long not in schedule.running
    until(schedule, lambda: long in schedule.running)
    started = sum(each.stats.tokens > 0 for each in short)
    assert MAX_PASSES * ROWS <= started < MAX_PASSES * ROWS + ROWS, "some start beside it"
    until(schedule, lambda: schedule.is_idle)


def test_a_long_request_that_is_cancelled_while_it_waits_holds_nobody_up() -> None:
    schedule, long = opened(), row(0, 3900)
    schedule.add(row(1, 100))
    outcomes(schedule)
    schedule.add(long)
    outcomes(schedule)
    assert schedule.num_rows == 1, "a row waits for memory"
    long.finish_reason = "cancelled"
    outcomes(schedule)
    assert schedule.num_rows == ROWS
    assert schedule.num_waiting == 0


def test_a_client_has_no_more_rows_than_it_may() -> None:
    schedule = opened(max_rows_per_client=2)
    for i in range(6):
        schedule.add(row(i, 100 + 400 * (i % 2), client="a" if i < 4 else "b"))
    outcomes(schedule)
    assert sorted(str(each.client) for each in schedule.running) == ["a", "a", "b", "b"]
    until(schedule, lambda: schedule.is_idle)


def test_requests_without_max_tokens_leave_half_of_the_memory() -> None:
    schedule = opened()
    tokens = schedule.budget.short_entries
    assert tokens is not None and tokens > 100
    for i in range(ROWS):
        schedule.add(row(i, tokens // 2, prompt=tokens // 2))
    outcomes(schedule)
    until(schedule, lambda: schedule.num_running == ROWS)
    assert reserved(schedule) <= ENTRIES // 2


def test_long_requests_of_several_clients_all_start() -> None:
    """Each client always has short requests, which pass its long one; nobody waits for more than its turn."""
    schedule, numbers = opened(), count()
    longs = [row(1000 + i, 3000, client=name) for i, name in enumerate("AD")]
    started: list[int] = []
    for name in "AD":
        for _ in range(6):
            schedule.add(row(next(numbers), 20 + next(numbers) % 13, client=name))
    outcomes(schedule)
    for long in longs:
        schedule.add(long)
    while not all(long.finish_reason for long in longs):
        for event in outcomes(schedule):
            if event.finish_reason and event.seq < 1000:
                schedule.add(row(next(numbers) % 1000, 20 + next(numbers) % 13, client="AD"[event.seq % 2]))
        started += [i for i, long in enumerate(longs) if long in schedule.running and i not in started]
        assert max(seq.num_passes for seq in longs) <= MAX_PASSES * ROWS
    assert sorted(started) == [0, 1]


def test_memory_of_rows_that_ended_is_returned() -> None:
    """Within a budget a row's memory is freed before another uses it, so that only live entries count."""

    class Releasing(FakeCache):
        def release(self, row: int) -> None:
            self.entries[row] = -1

        @property
        def written(self) -> int:
            return int((self.entries >= 0).sum())

    schedule = opened()
    cache = schedule.batch.cache = Releasing(ROWS)
    rows = [row(i, n) for i, n in enumerate([900, 5, 700, 30, 5, 1200, 5, 5, 800, 60, 5, 1000])]
    for each in rows:
        schedule.add(each)
    most = 0
    while not schedule.is_idle:
        outcomes(schedule)
        cache = schedule.batch.cache  # type: ignore[assignment]
        if isinstance(cache, Releasing):
            live = sum(seq.cursor for seq in schedule.running)
            most = max(most, cache.written)
            assert cache.written <= live + ROWS * 64
    assert 0 < most <= ENTRIES


def test_capacity_shrinks_when_only_short_rows_are_left() -> None:
    schedule = Schedule(FakeBackend(chaotic), BLOCK, MASK, Limits(ROWS))
    schedule.add(row(0, 500))
    schedule.add(row(1, 1, prompt=6000))
    until(schedule, lambda: len(schedule.running) == 2)
    until(schedule, lambda: len(schedule.running) == 1)
    assert schedule.batch.cache.capacity <= 1024
    [seq] = schedule.running
    until(schedule, lambda: schedule.is_idle)
    alone = row(0, 500)
    list(decode(FakeBackend(chaotic), [alone], BLOCK, MASK))
    assert seq.tokens == alone.tokens


def test_a_row_that_cannot_grow_ends_alone() -> None:
    class Small(FakeCache):
        def reserve(self, capacity: int, lengths: Sequence_[int] = ()) -> None:
            if capacity > 128:
                raise SessionError("not enough memory", code="out_of_memory")
            super().reserve(max(capacity, 128), lengths)

    backend = FakeBackend(chaotic)
    backend.new_cache = Small  # type: ignore[method-assign, assignment]
    seqs = [row(0, 300, prompt=60), *(row(i, 90, prompt=10) for i in range(1, 4))]
    events = [e for step in decode(backend, seqs, BLOCK, MASK) for e in step if e.finish_reason]
    assert [(e.seq, e.error is None) for e in events if e.error] == [(0, False)]
    assert [seq.finish_reason for seq in seqs] == ["cancelled", "length", "length", "length"]
    assert len(seqs[0].tokens) >= 128
