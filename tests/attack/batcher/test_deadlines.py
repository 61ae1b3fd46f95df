"""Deadlines: in the queue, in a row that runs, in a long forced text, and those that cannot be."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.automata import Automaton
from support.batchers import LONG, SHORT, SOON
from support.stalling import behind_a_gate, paced

from mars_export import Batcher, GenerationConfig, Limits, Session, SessionError
from mars_export.runtime.structured.grammar_state import GrammarState


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
    grammar_state = GrammarState(Automaton(edges, frozenset(), size), (), False)
    monkeypatch.setattr(Session, "grammar_state", lambda *_: grammar_state)
    config = GenerationConfig(max_new_tokens=395, choice=("any",))
    with Batcher(session, Limits(prefill_tokens=16)) as batcher:
        backend.hold()
        request = batcher.submit([7, 8], config, deadline=60)
        until = time.monotonic() + SOON
        while not (backend.is_waiting and request.seq.cursor > 32):
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
        assert request.seq.cursor < 80 < request.seq.num_pending


@pytest.mark.parametrize("deadline", [0, -1, float("nan"), float("inf"), "1", True])
def test_deadlines_that_cannot_be(batcher: Batcher, deadline: Any) -> None:
    with pytest.raises(SessionError, match="deadline must be a number of seconds above 0"):
        batcher.submit([1], SHORT, deadline=deadline)
