"""Rows of different lengths within one KV budget: who runs beside whom, and who waits how long."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from support.chaos import BLOCK, chaotic
from support.fake import MASK, FakeBackend
from support.loops import decode, outcomes

from mars_export.runtime.decode.batch import KvBudget
from mars_export.runtime.decode.config import GenerationConfig
from mars_export.runtime.decode.lanes import MAX_PASSES, Lanes
from mars_export.runtime.decode.limits import Limits
from mars_export.runtime.decode.schedule import Schedule
from mars_export.runtime.decode.sequence import Sequence

ENTRIES = 8 * 512  # of KV memory
ROWS = 8


def row(index: int, tokens: int, prompt: int = 4, client: str | None = None) -> Sequence:
    config = GenerationConfig(tau=1.0, max_new_tokens=tokens)
    return Sequence(index, [1] * prompt, config, (), client=client)


def lanes(entries: int = ENTRIES, **limits: int) -> Lanes:
    def open_schedule(limits: Limits, budget: KvBudget) -> Schedule:
        return Schedule(backend, BLOCK, MASK, limits, None, budget)

    backend = FakeBackend(chaotic)
    budget = KvBudget(ROWS, entries, entry_bytes=1, max_capacity=2 * entries)
    return Lanes(Limits(ROWS, **limits), budget, open_schedule)


def reserved(schedule: Lanes) -> int:
    return sum(lane.num_rows * lane.row_bytes for lane in schedule._lanes)


def until(schedule: Lanes, over: Callable[[], bool]) -> int:
    """Iterations until something holds."""
    for n in range(40_000):
        if over():
            return n
        outcomes(schedule)
        assert schedule.num_running <= ROWS
        assert reserved(schedule) <= ENTRIES
    raise AssertionError("waits for ever")


def test_short_requests_flow_beside_a_long_one() -> None:
    schedule, long = lanes(), row(0, 1400)
    schedule.add(long)
    outcomes(schedule)
    short = [row(i, 100) for i in range(1, 41)]
    for each in short:
        schedule.add(each)
    outcomes(schedule)
    assert schedule.num_running == ROWS, "the long one, and seven beside it"
    until(schedule, lambda: all(each.finish_reason for each in short))
    assert long.finish_reason is None
    until(schedule, lambda: long.finish_reason is not None)
    assert len(long.tokens) == 4 + 1400


def test_a_long_request_joins_short_ones_that_run() -> None:
    schedule, long = lanes(), row(99, 1200)
    for i in range(ROWS - 1):
        schedule.add(row(i, 100))
    outcomes(schedule)
    schedule.add(long)
    outcomes(schedule)
    assert schedule.num_running == ROWS and long in schedule.running


def test_short_requests_flow_while_a_long_one_waits_but_it_is_not_passed_for_ever() -> None:
    """The long one needs nearly all memory. Others pass it, and then it is next."""
    schedule, long = lanes(), row(0, 3000)
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
    schedule, long = lanes(), row(0, 3000)
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
    schedule = lanes(max_rows_per_client=2)
    for i in range(6):
        schedule.add(row(i, 100 + 400 * (i % 2), client="a" if i < 4 else "b"))
    outcomes(schedule)
    assert sorted(str(each.client) for each in schedule.running) == ["a", "a", "b", "b"]
    until(schedule, lambda: schedule.is_idle)


def test_requests_without_max_tokens_leave_half_of_the_memory() -> None:
    schedule = lanes()
    tokens = schedule.budget.short_entries
    assert tokens is not None and tokens > 100
    for i in range(ROWS):
        schedule.add(row(i, tokens // 2, prompt=tokens // 2))
    outcomes(schedule)
    assert schedule.num_running + schedule.num_waiting == ROWS
    assert len(schedule._lanes) == 1 and reserved(schedule) <= ENTRIES // 2


@pytest.mark.parametrize("seed", range(5))
def test_any_mix_ends_with_the_tokens_of_each_row_alone(seed: int) -> None:
    draw = Random(seed)
    schedule = lanes()
    sizes = [draw.choice([5, 40, 100, 500, 2800]) for _ in range(10)]
    rows = [row(i, tokens, prompt=draw.choice([1, 30, 90])) for i, tokens in enumerate(sizes)]
    for each in rows:
        schedule.add(each)
        if draw.random() < 0.5:
            outcomes(schedule)
            assert reserved(schedule) <= ENTRIES
    until(schedule, lambda: schedule.is_idle)
    for each, tokens in zip(rows, sizes, strict=True):
        if tokens <= 100:
            alone = row(0, tokens, prompt=each.stats.prompt_tokens)
            list(decode(FakeBackend(chaotic), [alone], BLOCK, MASK))
            assert each.tokens == alone.tokens
        assert each.stats.tokens == tokens
