"""A request: settings that cannot be, and events that come once."""

from __future__ import annotations

import pytest
from support.batchers import LONG, SHORT, goes_on

from mars_export import Batcher, SessionError


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
