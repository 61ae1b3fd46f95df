"""A step that hangs blocks nobody but its rows, and these may be cancelled, expire and be read so far."""

from __future__ import annotations

import asyncio
import time

from support.batchers import LONG, SOON
from support.stalling import Stalling, behind_a_gate

from mars_export import Batcher, Event, Session


def test_a_hanging_step_blocks_nobody_but_its_rows(stalled: tuple[Batcher, Stalling]) -> None:
    batcher, backend = stalled
    assert batcher.step_seconds == 0
    running, waiting = batcher.submit([1], LONG), batcher.submit([2], LONG)
    assert backend.entered.wait(SOON)
    began = time.perf_counter()
    assert running.completion.token_ids == ()
    running.cancel()
    assert running.result().finish_reason == "cancelled"
    assert batcher.step_seconds > 0
    assert batcher.alive
    assert not batcher.close(timeout=0.05), "the step still hangs"
    assert waiting.result().finish_reason == "cancelled"
    assert not batcher.alive
    assert time.perf_counter() - began < SOON / 2


def test_deadlines_end_requests_of_a_step_that_hangs(stalled: tuple[Batcher, Stalling]) -> None:
    batcher, backend = stalled
    one, two, three = (batcher.submit([i], LONG, deadline=0.05) for i in range(3))
    assert backend.entered.wait(SOON)
    assert one.result().finish_reason == "deadline"
    assert list(two) == [Event("", (), (), "deadline")]

    async def read() -> list[Event]:
        return [event async for event in three]

    assert asyncio.run(read()) == [Event("", (), (), "deadline")]
    assert batcher.counts.expired == 3


def test_the_answer_so_far_is_what_the_events_had(session: Session) -> None:
    session, backend = behind_a_gate(session)
    backend.gate.set()
    with Batcher(session) as batcher:
        request = batcher.submit([1, 2], LONG)
        events = iter(request)
        had = [next(events) for _ in range(3)]
        backend.gate.clear()
        backend.entered.clear()
        assert backend.entered.wait(SOON)
        so_far = request.completion
        request.cancel()
        backend.gate.set()
        had += list(events)
        done = request.completion
    assert so_far.token_ids == done.token_ids == tuple(t for event in had for t in event.token_ids)
    assert done.text == "".join(event.text for event in had)
    assert len(done.confidences) == len(done.token_ids) == done.stats.tokens
    assert had[-1].finish_reason == done.finish_reason == "cancelled"
