"""Whom a batcher lets in: admission.json, which libmars reads too, and bursts, floods and cancels."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.fixtures import Sessions
from support.paths import ROOT
from support.stalling import behind_a_gate

from mars_export import Batcher, GenerationConfig, Limits, Overloaded, Session
from mars_export.runtime.batcher.admission_queue import AdmissionQueue

CASES = json.loads((ROOT / "tests/conformance/admission.json").read_text(encoding="utf-8"))
LIMITS = ("max_rows", "max_waiting", "client_share", "max_rows_per_client")
LONG = GenerationConfig(max_new_tokens=300, tau=1.0, eos_ids=())
SHORT = GenerationConfig(max_new_tokens=2, tau=1.0, eos_ids=())


@pytest.fixture
def session(sessions: Sessions) -> Session:
    return sessions("llama")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_who_is_let_in(case: dict[str, Any]) -> None:
    admission = AdmissionQueue(Limits(**{name: case[name] for name in LIMITS}))
    for event in case["events"]:
        if len(event) == 1:
            admission.forget(event[0])
            continue
        client, rows, held, said = event
        refusal = admission.refusal(client, rows, held)
        assert (said is None) == (refusal is None) and str(said or "") in str(refusal), event
        if refusal is None:
            admission.admit(client)


def test_a_flood_leaves_rows_to_others(session: Session) -> None:
    """What waits because its client has its rows takes none of those that others find free."""
    session, backend = behind_a_gate(session)
    with Batcher(session, Limits(max_rows=3, max_rows_per_client=1, max_waiting=4)) as batcher:
        flood = [batcher.submit([1], SHORT, client="flood") for _ in range(5)]
        with pytest.raises(Overloaded, match="4 requests wait already"):
            batcher.submit([1], SHORT, client="flood")
        others = [batcher.submit([1], SHORT, client=name) for name in ("a", None)]
        for client in ("a", "b", None):  # no row is free now
            with pytest.raises(Overloaded, match="4 requests wait already"):
                batcher.submit([1], SHORT, client=client)
        backend.gate.set()
        assert all(len(request.result(60).token_ids) == 2 for request in flood + others)
        assert not batcher._admission._clients, "nobody is remembered"


def test_long_requests_that_fill_the_memory_leave_no_free_rows(session: Session) -> None:
    """Rows that the KV memory has no room for are not free, and are again once it has."""
    whole = session.kv_budget(1, 10**9)
    row = session.new_sequence(0, [1], LONG, None)
    session, backend = behind_a_gate(session)
    with Batcher(
        session, Limits(max_rows=4, max_waiting=1, kv_bytes=whole.entries(row) * whole.entry_bytes)
    ) as batcher:
        assert batcher._schedule.num_rows == 4
        long = batcher.submit([1], LONG)
        assert backend.entered.wait(60)
        assert batcher._schedule.num_rows == 1
        next_one = batcher.submit([1], LONG)
        with pytest.raises(Overloaded, match="1 requests wait already"):
            batcher.submit([1], LONG)
        for request in (long, next_one):
            request.cancel()
        backend.gate.set()
        assert batcher.submit([1], SHORT, wait=60).result(60).finish_reason == "length"
