"""Continuous batching: every sequence gets what it would get alone, whoever joins, leaves, waits or fails
beside it.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.batchers import LONG
from support.chaos import BLOCK, chaotic
from support.fake import MASK, FakeBackend
from support.fixtures import Sessions
from support.loops import decode, outcomes
from support.stalling import Paced, behind_a_gate

from mars_export import Batcher, GenerationConfig, Limits, Overloaded, Session, SessionError
from mars_export.runtime.batcher.request import Request
from mars_export.runtime.decode.backend import StepOutput
from mars_export.runtime.decode.event import Event
from mars_export.runtime.decode.schedule import Schedule
from mars_export.runtime.decode.sequence import Sequence


def test_memory_of_a_long_row_is_given_back_when_nothing_runs() -> None:
    backend = FakeBackend(chaotic)
    schedule = Schedule(backend, BLOCK, MASK, Limits(max_rows=2))
    schedule.add(Sequence(0, [1] * 300, GenerationConfig(max_new_tokens=2, eos_ids=()), ()))
    while not schedule.is_idle:
        outcomes(schedule)
    assert len(backend.caches) == 2
    assert backend.caches[-1].capacity == 0


def test_a_backend_that_fails_once_ends_the_rows_of_that_forward_only() -> None:
    class Flaky(FakeBackend):
        broken = False

        def step(self, *arguments: Any) -> StepOutput:
            if self.broken:
                raise SessionError("device lost")
            return super().step(*arguments)

    backend = Flaky(chaotic)
    schedule = Schedule(backend, BLOCK, MASK, Limits(max_rows=2))
    schedule.add(Sequence(0, [1, 2], GenerationConfig(max_new_tokens=50, eos_ids=()), ()))
    outcomes(schedule)
    backend.broken = True
    assert [f.seq for f in outcomes(schedule) if f.error] == [0]
    backend.broken = False
    seq, alone = (Sequence(1, [5, 6, 7], GenerationConfig(max_new_tokens=20, eos_ids=()), ()) for _ in "ab")
    schedule.add(seq)
    while not schedule.is_idle:
        assert not any(event.error for event in outcomes(schedule))
    list(decode(FakeBackend(chaotic), [alone], BLOCK, MASK))
    assert seq.tokens == alone.tokens


# --- the engine, on a real bundle ---


@pytest.fixture
def session(sessions: Sessions) -> Session:
    return sessions("llama")


@pytest.fixture
def batcher(session: Session) -> Iterator[Batcher]:
    with Batcher(session, Limits(max_rows=3, max_waiting=100, prefill_tokens=32)) as made:
        yield made


def asked(seed: int) -> tuple[list[int], GenerationConfig]:
    draw = random.Random(seed)
    prompt = [draw.randrange(250) for _ in range(draw.choice((1, 5, 30, 90)))]
    sampled = {"temperature": 1.0, "seed": seed} if draw.random() < 0.3 else {}
    return prompt, GenerationConfig(
        tau=draw.choice((1.0, 0.9, 0.4)),
        max_new_tokens=draw.randint(1, 24),
        masks=draw.choice(("auto", 1)),
        **sampled,
    )


@pytest.mark.parametrize("name", ["llama", "qwen3-mixed"])
def test_many_threads_get_what_each_would_get_alone(name: str, sessions: Sessions) -> None:
    session, seeds = sessions(name), range(24)
    batcher = Batcher(session, Limits(max_rows=3, max_waiting=100, prefill_tokens=32))
    found: dict[int, Any] = {}

    def work(mine: list[int]) -> None:
        for seed in mine:
            time.sleep(random.Random(seed).random() / 200)
            request = batcher.submit(*asked(seed))
            tokens = [t for event in request for t in event.token_ids]
            found[seed] = request.result(5)
            assert tokens == list(found[seed].token_ids)

    threads = [threading.Thread(target=work, args=(list(seeds[i::6]),)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for seed in seeds:
        expected = session.generate(*asked(seed))
        got = found[seed]
        assert (got.token_ids, got.finish_reason, got.text) == (
            expected.token_ids,
            expected.finish_reason,
            expected.text,
        )
        np.testing.assert_allclose(got.confidences, expected.confidences, atol=1e-5)
        assert got.stats.accepted == expected.stats.accepted
    assert batcher.num_running == batcher.num_waiting == 0
    assert batcher.close()


def test_cancelling_frees_the_row(batcher: Batcher) -> None:
    running = [batcher.submit([1, 2, i], LONG) for i in range(3)]
    waiting = [batcher.submit([3, 4, i], LONG) for i in range(2)]
    next(iter(running[0]))  # leaving the loop early cancels it
    for request in running[1:] + waiting[:1]:
        request.cancel()
    last = GenerationConfig(tau=1.0, max_new_tokens=3, eos_ids=())
    waiting[1].cancel()
    assert len(batcher.submit([9], last).result(30).token_ids) == 3
    assert all(request.result(5).finish_reason == "cancelled" for request in running + waiting)
    assert len(waiting[0].completion.token_ids) == 0


def test_leaving_an_async_stream_cancels_it(batcher: Batcher) -> None:
    async def main() -> None:
        request = batcher.submit([1, 2], LONG)
        stream = request.__aiter__()
        await stream.__anext__()
        await stream.aclose()  # type: ignore[attr-defined]
        assert request.result(5).finish_reason == "cancelled"

    asyncio.run(main())


def test_a_full_queue_refuses_or_waits(session: Session) -> None:
    session, backend = behind_a_gate(session)
    with Batcher(session, Limits(max_rows=1, max_waiting=2)) as batcher:
        first = batcher.submit([1], LONG)
        assert backend.entered.wait(60)
        others = [batcher.submit([2], LONG) for _ in range(2)]
        with pytest.raises(Overloaded, match=r"2 requests wait already \(max_waiting\); try again in 1 s"):
            batcher.submit([3], LONG)
        began = time.perf_counter()
        with pytest.raises(Overloaded, match="requests wait already") as caught:
            batcher.submit([3], LONG, wait=0.05)
        assert time.perf_counter() - began >= 0.05
        assert caught.value.retry_after == 1
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(batcher.submit, [3], GenerationConfig(max_new_tokens=1), wait=None)
            first.cancel()
            backend.gate.set()
            request = late.result(60)
            for other in others:
                other.cancel()
            assert len(request.result(60).token_ids) == 1
        assert batcher.counts.overloaded == 2


def test_tau_may_change_while_a_request_runs(
    session: Session, batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = session.backend.step

    def slow(*arguments: Any) -> StepOutput:
        time.sleep(0.005)  # so that the reader is never far behind
        return step(*arguments)

    monkeypatch.setattr(session.backend, "step", slow)
    request = batcher.submit([5, 6, 7], GenerationConfig(tau=1.0, max_new_tokens=60, eos_ids=()))
    runs = []
    for event in request:
        runs.append(len(event.token_ids))
        request.tau = 0.0
    assert runs[0] == 1
    assert max(runs[2:]) > 1


def test_a_result_that_takes_too_long(batcher: Batcher) -> None:
    with pytest.raises(SessionError, match="not finished after 0.001 seconds"):
        batcher.submit([1], LONG).result(0.001)


def test_statistics_count_what_was_delivered(session: Session) -> None:
    gated, gate = behind_a_gate(session)
    with Batcher(gated) as batcher:
        request = batcher.submit([1, 2], LONG)
        assert gate.entered.wait(5)
        request.cancel()
        gate.gate.set()
    assert request.seq.stats.tokens > 0, "the step went on"
    assert request.stats.tokens == len(request.result().token_ids) == 0
    assert request.stats.queue_time > 0


def test_the_first_tokens_do_not_wait_for_the_next_forward(session: Session) -> None:
    backend = Paced(session.backend)
    backend.hold()
    with Batcher(Session(session.bundle, session.variant, backend, session.text)) as batcher:
        request = batcher.submit([1, 2], LONG)
        backend.let()  # the prompt, not the decode forward of the same step
        assert next(iter(request)).token_ids
        backend.open()
        request.cancel()


def test_a_cancelled_submission_keeps_its_thread_of_the_executor(
    batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, gate = threading.Event(), threading.Event()
    real = batcher._new_request

    def slow(*arguments: Any) -> Any:
        entered.set()
        assert gate.wait(10)
        return real(*arguments)

    monkeypatch.setattr(batcher, "_new_request", slow)
    before = batcher.counts

    async def ask() -> None:
        with ThreadPoolExecutor(1) as one:
            first = asyncio.create_task(batcher.asubmit([1], executor=one))
            await asyncio.to_thread(entered.wait, 5)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert batcher.counts == before, "it was not refused"
            second = asyncio.create_task(batcher.asubmit([2], executor=one))
            await asyncio.sleep(0.05)
            assert not second.done()
            gate.set()
            (await asyncio.wait_for(second, 5)).cancel()

    asyncio.run(ask())


def test_the_counts_between_two_events_of_a_step_are_those_of_the_events() -> None:
    """A step may give a sequence two events: the end of its prompt, and its first decode."""
    seq = Sequence(0, [1, 2], GenerationConfig(max_new_tokens=8), ())
    request = Request(seq, lambda *_: None)
    seq.stats.tokens = 2
    request.deliver(Event("", (5,), (0.5,), None))
    assert request.completion.token_ids == (5,) and request.completion.stats.tokens == 1
