"""What an attack found in the batcher, each by its smallest reproduction, and a short form of its load."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attack import load
from support.automata import Automaton
from support.fake import MASK, FakeBackend
from support.fixtures import Sessions
from support.paths import ROOT
from support.stalling import Stalling, behind_a_gate, paced
from support.unsure import predict

from mars_export.runtime import (
    Batcher,
    Counts,
    Event,
    GenerationConfig,
    Limits,
    Overloaded,
    Request,
    Session,
    SessionError,
)
from mars_export.runtime.decode.backend import StepOutput
from mars_export.runtime.decode.guide import Guide
from mars_export.runtime.decode.policy import Policy
from mars_export.runtime.decode.row import Row
from mars_export.runtime.decode.schedule import Schedule, decode
from mars_export.runtime.places import Places

BUNDLE = ROOT / "tests" / "runtime" / "bundle" / "written-by-1.1"
SHORT = GenerationConfig(max_new_tokens=4, eos_ids=())
LONG = GenerationConfig(tau=1.0, max_new_tokens=400, eos_ids=())
SOON = 10.0  # seconds; what takes longer hangs


class Panic(BaseException):
    """What a library in Rust raises: no Exception."""


def panic(*_: object, **__: object) -> Any:
    raise Panic("a panic")


@pytest.fixture
def session(sessions: Sessions) -> Session:
    return sessions("llama")


@pytest.fixture
def batcher(session: Session) -> Iterator[Batcher]:
    with Batcher(session, Limits(max_rows=3)) as made:
        yield made


@pytest.fixture
def stalled(session: Session) -> Iterator[tuple[Batcher, Stalling]]:
    """A batcher of one row, in whose first step the device hangs."""
    session, backend = behind_a_gate(session)
    batcher = Batcher(session, Limits(max_rows=1, max_waiting=8))
    yield batcher, backend
    backend.gate.set()
    assert batcher.close(timeout=SOON)


def goes_on(batcher: Batcher) -> bool:
    """Whether a batcher answers, and as ever."""
    expected = batcher.session.generate([9, 8, 7], SHORT).token_ids
    return batcher.alive and batcher.submit([9, 8, 7], SHORT).result(SOON).token_ids == expected


# --- (3) panics in the batcher's thread ---


def test_a_stop_condition_that_panics_ends_its_row(batcher: Batcher) -> None:
    good, bad = batcher.submit([1, 2], LONG), batcher.submit([3], LONG)
    bad._row.stop = panic
    with pytest.raises(Panic):
        bad.result(SOON)
    assert good.finish_reason is None
    assert goes_on(batcher)
    assert batcher.counts.failed == 1


def test_a_text_that_panics_ends_its_row(batcher: Batcher) -> None:
    bad = batcher.submit([3], LONG)
    assert bad._text is not None
    bad._text.read = panic  # type: ignore[method-assign]
    with pytest.raises(Panic):
        for _ in bad:
            pass
    assert bad.completion.finish_reason == "cancelled"
    assert goes_on(batcher)


def test_a_policy_that_panics_ends_the_rows_of_that_step(
    batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Policy, "feeds", panic)
        with pytest.raises(Panic):
            batcher.submit([3], LONG).result(SOON)
    assert goes_on(batcher)


def test_a_draft_that_panics_ends_its_row(batcher: Batcher) -> None:
    good = batcher.submit([1, 2], SHORT)
    bad = batcher.submit([3], GenerationConfig(max_new_tokens=50, eos_ids=()))
    bad._row.proposer = type("Bad", (), {"propose": panic})()
    with pytest.raises(Panic):
        bad.result(SOON)
    assert len(good.result(SOON).token_ids) == 4
    assert goes_on(batcher)


def test_costs_that_cannot_be_measured_are_said_where_the_batcher_is_made(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mars_export.runtime.session.measure", panic)
    threads = threading.active_count()
    with pytest.raises(Panic):
        Batcher(Session(session.bundle, session.variant, session.backend))
    assert threading.active_count() == threads


def test_a_fault_of_the_loop_itself_tells_everybody(session: Session) -> None:
    session, backend = behind_a_gate(session)
    batcher = Batcher(session, Limits(max_rows=1, max_waiting=5))
    requests = [batcher.submit([i], LONG) for i in range(4)]
    assert backend.entered.wait(SOON)
    batcher._schedule._batch.move = panic  # type: ignore[method-assign]
    batcher._schedule._drop_finished = panic  # type: ignore[method-assign]
    backend.gate.set()
    for request in requests:
        with pytest.raises(Panic):
            request.result(SOON)
    batcher._thread.join(SOON)
    assert not batcher.alive
    assert batcher.counts == Counts(accepted=4, failed=4, prompt_tokens=4, tokens=batcher.counts.tokens)
    with pytest.raises(SessionError, match=r"this batcher failed \(Panic\); make a new one"):
        batcher.submit([1], SHORT)
    with pytest.raises(SessionError, match="this batcher failed"):
        asyncio.run(batcher.asubmit([1], SHORT, wait=None))
    assert batcher.close()


# --- (6) big prompts ---


def test_queue_and_length_are_looked_at_before_a_prompt_is_tokenized(
    stalled: tuple[Batcher, Stalling], monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher, backend = stalled
    text = batcher.session.text
    assert text is not None
    monkeypatch.setattr(text, "tokenizer", None)  # whoever asks it fails with another error
    for prompt in ("light " * 2**20, [{"role": "user", "content": "light " * 2**20}]):
        with pytest.raises(SessionError, match="characters, .* at most .*; shorten it"):
            batcher.submit(prompt, SHORT)
    with pytest.raises(SessionError, match="the prompt has 10000000 tokens"):
        batcher.submit([1] * 10**7, SHORT)
    batcher.submit([1], LONG)
    assert backend.entered.wait(SOON)
    for _ in range(8):
        batcher.submit([1], LONG)
    with pytest.raises(Overloaded):
        batcher.submit("light", SHORT)
    batcher.close(timeout=0.01)
    with pytest.raises(SessionError, match="this batcher is closed"):
        batcher.submit("light", SHORT)


def test_the_event_loop_goes_on_while_a_prompt_is_tokenized(
    batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized = threading.Event()
    encode = batcher.session.encode

    def slowly(*arguments: Any) -> list[int]:
        assert tokenized.wait(SOON), "the event loop waited for the tokenizer"
        return encode(*arguments)

    monkeypatch.setattr(batcher.session, "encode", slowly)

    async def main() -> tuple[int, ...]:
        asyncio.get_running_loop().call_later(0.01, tokenized.set)
        request = await batcher.asubmit([9, 8, 7], SHORT)
        return (await request.aresult()).token_ids

    found = asyncio.run(main())
    monkeypatch.undo()
    assert found == batcher.session.generate([9, 8, 7], SHORT).token_ids


def test_coroutines_wait_for_room_and_may_be_cancelled_there(stalled: tuple[Batcher, Stalling]) -> None:
    batcher, backend = stalled
    requests = [batcher.submit([1], SHORT)]
    assert backend.entered.wait(SOON)
    requests += [batcher.submit([1], SHORT) for _ in range(8)]

    async def main() -> int:
        with pytest.raises(Overloaded):
            await batcher.asubmit([2], SHORT, wait=0.02)
        impatient = asyncio.create_task(batcher.asubmit([2], SHORT, wait=None))
        patient = asyncio.create_task(batcher.asubmit([2], SHORT, wait=None))
        await asyncio.sleep(0.02)
        impatient.cancel()
        backend.gate.set()
        return len((await (await patient).aresult()).token_ids)

    assert asyncio.run(asyncio.wait_for(main(), SOON)) == 4
    assert all(len(request.result(SOON).token_ids) == 4 for request in requests)
    assert batcher.counts == Counts(accepted=10, finished=10, overloaded=1, prompt_tokens=10, tokens=40)


# --- (13) the end of the interpreter ---

ENDS = """
import sys, threading
from mars_export.runtime import Batcher, GenerationConfig, Session
session = Session.open(sys.argv[1], threads=1)
batcher = Batcher(session)
requests = [batcher.submit([i + 1] * 40, GenerationConfig(tau=1.0, max_new_tokens=400, eos_ids=()))
            for i in range(20)]
next(iter(requests[0]))
end = {"return": lambda: None, "exit": lambda: sys.exit(3), "error": lambda: 1 / 0}[sys.argv[2]]
end()
"""


@pytest.mark.parametrize("how", ["return", "exit", "error"])
def test_a_program_may_end_while_a_batcher_runs(how: str) -> None:
    codes = []
    for _ in range(4):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", ENDS, str(BUNDLE), how],
                stderr=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            for _ in range(2)
        ]
        for process in processes:
            _, said = process.communicate(timeout=120)
            codes.append(process.returncode)
            assert b"terminate called" not in said
    assert codes == [{"return": 0, "exit": 3, "error": 1}[how]] * 8


# --- (15) limits ---


def test_what_one_request_may_ask_for(session: Session) -> None:
    limits = Limits(max_prompt_tokens=10, max_new_tokens=20, max_stops=2)
    with Batcher(session, limits) as batcher:
        with pytest.raises(SessionError, match="the prompt has 11 tokens, 10 are taken here; shorten"):
            batcher.submit([1] * 11, SHORT)
        with pytest.raises(
            SessionError, match="21 max_new_tokens are asked for, .* at most 20; ask for fewer"
        ):
            batcher.submit([1], GenerationConfig(max_new_tokens=21))
        many = GenerationConfig(max_new_tokens=1, stop=("a", "b", "c"), eos_ids=(1, 2, 3))
        with pytest.raises(SessionError, match="3 stop strings are .*; 3 eos_ids are"):
            batcher.submit([1], many)
        good = GenerationConfig(max_new_tokens=20, stop=("a", "b"), eos_ids=())
        assert batcher.submit([1] * 10, good).result(SOON).finish_reason in ("length", "stop")
        assert batcher.counts.refused == 3


def test_a_text_is_measured_by_the_limit_of_tokens_before_it_is_tokenized(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = session.text
    assert text is not None
    monkeypatch.setattr(text, "_most", 2**20)  # a bundle of a longer context
    with pytest.raises(SessionError, match="has 70000 characters, what is taken here is at most 65536"):
        text.encode("a" * 70000, 100)


def test_kv_memory_stays_within_its_budget(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long row makes all rows' memory long: it waits for a narrow batch, and nobody waits for ever."""
    entry = session.kv_budget(1, None).entry_bytes
    budget = 4 * 384 * entry
    caches: list[Any] = []
    new_cache = session.backend.new_cache

    def noted(num_rows: int) -> Any:
        caches.append(new_cache(num_rows))
        return caches[-1]

    monkeypatch.setattr(session.backend, "new_cache", noted)
    lengths = [5, 200, 5, 5, 330, 5, 90, 5, 300, 5, 5]
    most = 0
    with Batcher(session, Limits(max_rows=4, kv_bytes=budget)) as batcher:
        step = batcher._schedule.step

        def watched() -> Any:
            nonlocal most
            events = step()
            cache = batcher._schedule._batch.cache
            most = max(most, cache.num_rows * cache.capacity * entry)  # type: ignore[attr-defined]
            return events

        monkeypatch.setattr(batcher._schedule, "step", watched)
        config = GenerationConfig(max_new_tokens=30, eos_ids=())
        requests = [batcher.submit([7] * n, config) for n in lengths]
        for request, n in zip(requests, lengths, strict=True):
            assert request.result(60).token_ids == session.generate([7] * n, config).token_ids
    assert 0 < most <= budget
    assert {cache.num_rows for cache in caches} >= {2, 3, 4}, "longer rows ran with fewer beside them"


def test_a_request_that_never_fits_is_refused(session: Session) -> None:
    entry = session.kv_budget(1, None).entry_bytes
    with Batcher(session, Limits(kv_bytes=200 * entry)) as batcher:
        with pytest.raises(
            SessionError, match=r"100 tokens with max_new_tokens 256 may take .* MB .* \(kv_bytes\); shorten"
        ):
            batcher.submit([1] * 100)
        assert goes_on(batcher)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_rows": "8"}, "max_rows must be 1 or more, not '8'"),
        ({"max_rows": 1.5}, "max_rows must be 1 or more, not 1.5"),
        ({"max_waiting": float("nan")}, "max_waiting must be 1 or more, not nan"),
        ({"prefill_tokens": None}, "prefill_tokens must be 1 or more, not None"),
        ({"kv_bytes": 0}, "kv_bytes must be 1 or more, not 0"),
        ({"max_stops": True}, "max_stops must be 1 or more, not True"),
        ({"max_rows": 2**20 + 1}, "max_rows must be at most 1048576, not 1048577"),
        ({"max_waiting": 2**63 - 1}, "max_waiting must be at most 1048576"),
        ({"client_share": 0}, "client_share must be a number above 0, at most 1, not 0"),
        ({"client_share": float("nan")}, "client_share must be a number above 0"),
    ],
)
def test_limits_that_cannot_be(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(SessionError, match=words):
        Limits(**wrong)


def test_one_client_leaves_places_for_the_others(session: Session) -> None:
    session, backend = behind_a_gate(session)
    with Batcher(session, Limits(max_rows=2, max_waiting=8, client_share=0.4)) as batcher:
        greedy = [batcher.submit([1], SHORT, client="greedy") for _ in range(4)]
        with pytest.raises(Overloaded, match=r"this client has 4 requests here already \(client_share\)"):
            batcher.submit([1], SHORT, client="greedy")
        for wrong in ([], [10**6]):
            with pytest.raises(SessionError):
                batcher.submit(wrong, SHORT, client="modest")
        others = [batcher.submit([1], SHORT, client="modest"), batcher.submit([1], SHORT)]
        greedy[3].cancel()
        others.append(batcher.submit([1], SHORT, client="greedy"))
        backend.gate.set()
        assert all(len(request.result(SOON).token_ids) == 4 for request in greedy[:3] + others)
        assert not batcher._places._clients, "nobody is remembered"


# --- (16) a step that hangs ---


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


# --- deadlines, closing, forks, what is no prompt ---


def test_deadlines_in_the_queue_and_while_running(session: Session) -> None:
    session, backend = behind_a_gate(session)
    with Batcher(session, Limits(max_rows=1)) as batcher:
        running = batcher.submit([1, 2], LONG, deadline=60)
        assert backend.entered.wait(SOON)
        waiting = batcher.submit([3], LONG, deadline=0.001)
        time.sleep(0.01)
        backend.gate.set()
        done = waiting.result(SOON)
        assert (done.finish_reason, done.token_ids) == ("deadline", ())
        assert done.stats.queue_time >= 0.001
        running._deadline = 0.0  # it has come
        done = running.result(SOON)
        assert done.finish_reason == "deadline"
        assert session.generate([1, 2], LONG).token_ids[: len(done.token_ids)] == done.token_ids
        assert batcher.submit([1], SHORT, deadline=60).result(SOON).finish_reason == "length"


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
def test_a_long_forced_text_hears_that_it_is_over(
    how: str, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, backend = paced(session)
    size = session.bundle.manifest.model.vocab_size
    edges = [dict.fromkeys(range(size), 1), *({3: i + 2} for i in range(390)), dict.fromkeys(range(size), 0)]
    guide = Guide(Automaton(edges, frozenset(), size), (), False)
    monkeypatch.setattr(Session, "guide", lambda *_: guide)
    config = GenerationConfig(max_new_tokens=395, choice=("any",))
    with Batcher(session, Limits(prefill_tokens=16)) as batcher:
        backend.hold()
        request = batcher.submit([7, 8], config, deadline=60)
        until = time.monotonic() + SOON
        while not (backend.is_waiting and request._row.cursor > 32):
            backend.let(int(backend.is_waiting))
            assert time.monotonic() < until
            time.sleep(0.001)
        if how == "deadline":
            request._deadline = 0.0  # it has come
        else:
            request.cancel()
        backend.let()  # the piece in hand, and no other
        done = request.result(SOON)
        backend.open()
        assert done.finish_reason == how and len(done.token_ids) == 391
        assert request._row.cursor < 80 < request._row.num_pending


@pytest.mark.parametrize("deadline", [0, -1, float("nan"), float("inf"), "1", True])
def test_deadlines_that_cannot_be(batcher: Batcher, deadline: Any) -> None:
    with pytest.raises(SessionError, match="deadline must be a number of seconds above 0"):
        batcher.submit([1], SHORT, deadline=deadline)


@pytest.mark.parametrize("drain", [60, True])
def test_closing_may_wait_for_what_is_there(session: Session, drain: float) -> None:
    batcher = Batcher(session, Limits(max_rows=2))
    requests = [batcher.submit([i + 1], SHORT) for i in range(6)]
    assert batcher.close(drain=drain)
    assert [request.result(0).finish_reason for request in requests] == ["length"] * 6
    assert batcher.num_running == batcher.num_waiting == 0
    with pytest.raises(SessionError, match="this batcher is closed"):
        batcher.submit([1], SHORT)


def test_whoever_waits_for_room_is_told_of_a_deadline_and_of_the_end(
    stalled: tuple[Batcher, Stalling],
) -> None:
    batcher, backend = stalled
    batcher.submit([1], LONG)
    assert backend.entered.wait(SOON)
    for _ in range(8):
        batcher.submit([1], LONG)
    with pytest.raises(Overloaded):
        batcher.submit([1], SHORT, wait=None, deadline=0.02)
    with pytest.raises(Overloaded):
        asyncio.run(batcher.asubmit([1], SHORT, wait=None, deadline=0.02))
    with ThreadPoolExecutor(2) as pool:
        late = [
            pool.submit(batcher.submit, [1], SHORT, wait=None),
            pool.submit(lambda: asyncio.run(batcher.asubmit([1], SHORT, wait=None))),
        ]
        time.sleep(0.05)
        batcher.close(timeout=0.01)
        for waiting in late:
            with pytest.raises(SessionError, match="this batcher is closed"):
                waiting.result(SOON)


def test_a_drain_has_an_end(stalled: tuple[Batcher, Stalling], caplog: pytest.LogCaptureFixture) -> None:
    batcher, _ = stalled
    request = batcher.submit([1], LONG)
    with caplog.at_level(logging.WARNING, "mars_export"):
        assert not batcher.close(drain=0.05, timeout=0.05)
    assert request.result(0).finish_reason == "cancelled"
    assert "batcher closing: 1 requests cancelled" in caplog.text
    assert "a step hangs" in caplog.text


def test_true_is_no_second(stalled: tuple[Batcher, Stalling]) -> None:
    batcher, backend = stalled
    request = batcher.submit([1], SHORT)
    assert backend.entered.wait(SOON)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(batcher.close, drain=True)
        time.sleep(1.2)  # drain=1 would have cancelled by now
        assert not closing.done()
        backend.gate.set()
        assert closing.result(SOON)
    assert request.result(0).finish_reason == "length"


@pytest.mark.parametrize("drain", [-1, float("nan"), float("inf"), "1", None])
def test_drains_that_cannot_be(batcher: Batcher, drain: Any) -> None:
    with pytest.raises(SessionError, match="drain must be True or a number of seconds"):
        batcher.close(drain=drain)
    assert batcher.alive, "nothing was closed"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_told_to_make_its_own(batcher: Batcher) -> None:
    request = batcher.submit([1], LONG)
    child = os.fork()
    if child == 0:
        code = 0
        for ask in (lambda: batcher.submit([1], SHORT), request.result, lambda: list(request)):
            try:
                ask()
            except SessionError as error:
                code += "forked from" not in str(error)
            else:
                code += 10
        request.cancel()
        batcher.close()
        os._exit(code + 100 * batcher.alive)
    until = time.monotonic() + SOON
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until:
        time.sleep(0.01)
    if done[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert done == (child, 0)
    assert goes_on(batcher), "the parent's batcher is as it was"


@pytest.mark.parametrize(
    "prompt",
    [5, None, 1.5, b"light", bytearray(b"a"), [True], [1, 2.0], ["a"], [None], {1: 2}, object(), [[1]]],
)
def test_what_is_no_prompt(batcher: Batcher, prompt: Any) -> None:
    with pytest.raises(SessionError):
        batcher.submit(prompt, SHORT)
    with pytest.raises(SessionError):
        batcher.session.generate(prompt, SHORT)
    assert batcher.counts == Counts(refused=1)


def test_settings_that_cannot_be(batcher: Batcher) -> None:
    request = batcher.submit([1], LONG)
    for tau in (10**400, float("nan"), -1, "x", True, float("inf")):
        with pytest.raises(SessionError, match="tau must be"):
            request.tau = tau
    with pytest.raises(SessionError, match="a config is a GenerationConfig, not str"):
        batcher.submit([1], "fast")  # type: ignore[arg-type]
    assert goes_on(batcher)


def test_events_are_read_once(batcher: Batcher) -> None:
    request = batcher.submit([1], SHORT)
    assert len(list(request)) >= 1
    with pytest.raises(SessionError, match="they come once"):
        list(request)


# --- what an operator sees ---


def test_counts_and_logs(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "mars_export")
    prompt = "a very secret prompt"
    with Batcher(session, Limits(max_rows=2)) as batcher:
        batcher.submit(prompt, SHORT, client="alice").result(SOON)
        left = batcher.submit(prompt, LONG, client="bob")
        left.cancel()
        bad = batcher.submit([3], LONG)
        bad._row.stop = lambda token: 1 / 0
        with pytest.raises(ZeroDivisionError):
            bad.result(SOON)
        with pytest.raises(SessionError):
            batcher.submit(prompt + "\ud800", SHORT)
        counts = batcher.counts
    assert (counts.accepted, counts.finished, counts.cancelled, counts.failed, counts.refused) == (
        3,
        1,
        1,
        1,
        1,
    )
    assert counts.ended == counts.accepted
    assert counts.to_dict()["tokens"] == counts.tokens >= 4
    for words in (
        "batcher started",
        "'alice' finished: length, 4 tokens",
        "'bob' cancelled",
        "ZeroDivisionError",
    ):
        assert words in caplog.text
    assert "secret" not in caplog.text


def test_nothing_is_logged_unasked() -> None:
    code = (
        "import sys; from mars_export.runtime import Batcher, Session\n"
        "with Batcher(Session.open(sys.argv[1], threads=1)) as b: b.submit([1])"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code, str(BUNDLE)], capture_output=True, env=env, timeout=120, check=True
    )
    assert (done.stdout, done.stderr) == (b"", b"")


# --- a long prompt and a short one behind it ---


def schedule_of(lengths: list[int], limits: Limits) -> tuple[list[Row], list[int], FakeBackend]:
    """Rows of these prompts, in the order in which they got their first token."""
    backend = FakeBackend(predict)
    schedule = Schedule(backend, 4, MASK, limits)
    rows = [Row(i, [1 + i] * n, SHORT, ()) for i, n in enumerate(lengths)]
    for row in rows:
        schedule.add(row)
    order: list[int] = []
    while not schedule.is_idle:
        order += [event.row for event in schedule.step() if event.row not in order]
    return rows, order, backend


@pytest.mark.parametrize("max_rows", [2, 3, 8])
def test_a_short_prompt_does_not_wait_for_a_long_one(max_rows: int) -> None:
    lengths = [1000, 5, 700, 40, 6]
    rows, order, _ = schedule_of(lengths, Limits(max_rows=max_rows, prefill_tokens=10))
    assert order.index(1) < order.index(0), "the short one answers first"
    assert order.index(3) < order.index(0)
    assert order.index(0) < order.index(2), "the long ones keep their order"
    for i, row in enumerate(rows):
        alone = Row(0, [1 + i] * lengths[i], SHORT, ())
        for _ in decode(FakeBackend(predict), [alone], 4, MASK):
            pass
        assert row.tokens == alone.tokens
        assert row.stats.prefill_forwards == -(-lengths[i] // 10) - 1, "in pieces of its own, as ever"


def test_a_long_prompt_goes_on_beside_any_number_of_short_ones() -> None:
    """Pieces are taken in turns: the long prompt gets every second one at least."""
    backend = FakeBackend(predict)
    schedule = Schedule(backend, 4, MASK, Limits(max_rows=8, prefill_tokens=10))
    long = Row(0, [1] * 100, SHORT, ())
    schedule.add(long)
    steps = 0
    while not long.stats.tokens:
        schedule.add(Row(1 + steps, [2, 3], SHORT, ()))
        schedule.step()
        steps += 1
    assert steps <= 21


# --- load ---


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_load(session: Session, seed: int) -> None:
    tally = load.play(session, seed, 120, num_threads=6, num_tasks=4)
    assert tally.wrong == []
    assert tally.whole >= 40
    assert tally.begun >= 10
    assert tally.refused >= 3


def test_the_load_sees_what_is_wrong(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batcher that gives other answers, and one that keeps its requests."""
    deliver = Request.deliver

    def other(self: Request, accepted: Any) -> None:
        deliver(self, accepted)
        if self._token_ids:
            self._token_ids[0] = -1

    with monkeypatch.context() as patch:
        patch.setattr(Request, "deliver", other)
        assert any("instead of" in words for words in load.play(session, 0, 20, 2, 2).wrong)
    with monkeypatch.context() as patch:
        patch.setattr(Places, "accept", lambda self: setattr(self, "num_entering", self.num_entering - 1))
        assert any("Counts" in words for words in load.play(session, 0, 20, 2, 2).wrong)


class Equal:
    """A backend to whose model another token is always as likely as its choice."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def step(self, *arguments: Any) -> StepOutput:
        output = self._backend.step(*arguments)
        ids = np.stack([output.token_ids, output.token_ids // 2], -1)
        return replace(output, topk_ids=ids, topk_logprobs=np.zeros(ids.shape, np.float32))


def test_last_bits_are_told_from_other_answers(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    config = GenerationConfig(tau=1.0, max_new_tokens=1, eos_ids=())
    asked = load.Asked([1, 2, 3], config, "read", 0, None, False)
    (alone,) = session.generate(asked.prompt, config).token_ids
    assert {other.token_ids for other in load.in_other_bits(session, asked)} == {(alone,)}
    backend = Equal(session.backend)
    monkeypatch.setattr(session, "backend", backend)
    assert {other.token_ids for other in load.in_other_bits(session, asked)} == {(alone,), (alone // 2,)}
    assert session.backend is backend


def test_the_load_goes_on_where_it_stopped(tmp_path: Any) -> None:
    state, figures = tmp_path / "state", tmp_path / "figures"
    program = [sys.executable, "-m", "attack.soak", "--requests", "20", "--bundle", str(BUNDLE)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for rounds in ("1", "2"):
        arguments = ["--rounds", rounds, "--state", str(state), "--figures", str(figures)]
        subprocess.run([*program, *arguments], env=env, timeout=300, check=True, capture_output=True)
    lines = state.read_text().splitlines()
    assert len(lines) == 2
    assert '"rounds": 2' in figures.read_text()
    assert '"wrong": 0' in figures.read_text()
