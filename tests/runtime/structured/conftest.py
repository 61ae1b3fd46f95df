"""The session that is asked for structured answers."""

from __future__ import annotations

import pytest
from support.agreement import MAIN
from support.fixtures import Sessions

from mars_export import Session


@pytest.fixture(scope="module")
def session(sessions: Sessions) -> Session:
    return sessions(MAIN)
