"""A process whose limits a test sets."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from support.limits import MB

from mars_export.runtime import headroom, machine


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[int, int]:
    """Limits that a test sets, of a process of 1,000 pages, 200 of them data; no control group."""
    limits: dict[int, int] = {resource.RLIMIT_STACK: 8 * MB}
    found = lambda kind: (limits.get(kind, resource.RLIM_INFINITY),) * 2  # noqa: E731
    monkeypatch.setattr(headroom.resource, "getrlimit", found)
    (tmp_path / "statm").write_text("1000 500 100 1 0 200 0\n")
    monkeypatch.setattr(headroom, "STATM", tmp_path / "statm")
    monkeypatch.setattr(machine, "group_left", lambda: None)
    monkeypatch.setattr(headroom, "return_freed", lambda: None)
    return limits
