"""Whose turn it is at the server: keys take turns, without keys addresses do, and each has its limit."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
from support.fixtures import Sessions
from support.missing import need

from mars_export import Batcher, GenerationConfig, Limits, Session

need("starlette", "serve")
from support.served import serving  # noqa: E402
from support.stalling import behind_a_gate  # noqa: E402

from mars_export.runtime.serve import ServeOptions  # noqa: E402


@pytest.fixture
def session(sessions: Sessions) -> Session:
    return sessions("llama")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Hashable]:
    """Whose each request to a batcher is."""
    clients: list[Hashable] = []
    real = Batcher.asubmit

    async def asubmit(self: Batcher, *arguments: Any, **named: Any) -> Any:
        clients.append(named["client"])
        return await real(self, *arguments, **named)

    monkeypatch.setattr(Batcher, "asubmit", asubmit)
    return clients


def test_keys_take_turns_and_without_keys_addresses_do(session: Session, asked: list[Hashable]) -> None:
    with serving({"tiny": session}, ServeOptions(keys=("alpha", "beta"))) as server:
        for key in ("beta", "alpha"):
            headers = {"authorization": f"Bearer {key}"}
            assert server.chat(max_tokens=1, headers=headers).status == 200
    with serving({"tiny": session}, ServeOptions()) as server:
        assert server.chat(max_tokens=1).status == 200
    assert asked == [1, 0, "127.0.0.1"]


def test_a_flood_of_one_client_does_not_delay_another(session: Session) -> None:
    slow, backend = behind_a_gate(session)
    backend.gate.set()  # while it measures
    slow.cost = session.cost
    few = GenerationConfig(max_new_tokens=2, tau=1.0, eos_ids=())
    with Batcher(slow, Limits(max_rows=1)) as batcher:
        backend.gate.clear()
        flood = [batcher.submit([5, 6], few, client="flood") for _ in range(20)]
        assert backend.entered.wait(30)
        other = batcher.submit([5, 6], few, client="other")
        backend.gate.set()
        other.result(60)
        assert {request.result(60).finish_reason for request in flood} == {"length"}
        # They came before it: who waited longer began later.
        assert all(other.stats.queue_time < request.stats.queue_time for request in flood[2:])
