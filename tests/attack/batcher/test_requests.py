"""A request: settings that cannot be, and events that come once."""

from __future__ import annotations

import pytest
from support.batchers import SHORT

from mars_export import Batcher, SessionError


def test_events_are_read_once(batcher: Batcher) -> None:
    request = batcher.submit([1], SHORT)
    assert len(list(request)) >= 1
    with pytest.raises(SessionError, match="they come once"):
        list(request)
