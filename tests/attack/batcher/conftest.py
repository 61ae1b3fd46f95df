"""Batchers to attack: one as it is, and one whose device hangs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.batchers import SOON
from support.fixtures import Sessions
from support.stalling import Stalling, behind_a_gate

from mars_export import Batcher, Limits, Session


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
