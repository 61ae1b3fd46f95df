"""Panics in the batcher's thread: they end their own row or step; one of the loop itself tells everybody."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.batchers import LONG, SHORT, SOON, goes_on
from support.loops import NoText
from support.stalling import behind_a_gate

from mars_export import Batcher, Counts, Limits, Session, SessionError


class Panic(BaseException):
    """What a library in Rust raises: no Exception."""


def panic(*_: object, **__: object) -> Any:
    raise Panic("a panic")


def test_a_stop_condition_that_panics_ends_its_row(batcher: Batcher) -> None:
    good, bad = batcher.submit([1, 2], LONG), batcher.submit([3], LONG)
    bad.seq.stream = NoText(panic)
    with pytest.raises(Panic):
        bad.result(SOON)
    assert good.finish_reason is None
    assert goes_on(batcher)
    assert batcher.counts.failed == 1


def test_a_fault_of_the_loop_itself_tells_everybody(session: Session) -> None:
    session, backend = behind_a_gate(session)
    batcher = Batcher(session, Limits(max_rows=1, max_waiting=5))
    requests = [batcher.submit([i], LONG) for i in range(4)]
    assert backend.entered.wait(SOON)
    batcher._schedule._drop_finished = panic  # type: ignore[method-assign, union-attr]
    backend.gate.set()
    for request in requests:
        with pytest.raises(Panic):
            request.result(SOON)
    batcher._thread.join(SOON)
    assert not batcher.alive and batcher.step_seconds == 0
    assert batcher.counts == Counts(accepted=4, failed=4, prompt_tokens=4, tokens=batcher.counts.tokens)
    with pytest.raises(SessionError, match=r"this batcher failed \(Panic\); make a new one"):
        batcher.submit([1], SHORT)
    with pytest.raises(SessionError, match="this batcher failed"):
        asyncio.run(batcher.asubmit([1], SHORT, wait=None))
    assert batcher.close()
