"""What an operator sees: counts and logs, no prompt in them, and nothing unasked."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
from support.batchers import LONG, SHORT, SOON
from support.loops import NoText
from support.paths import BUNDLE

from mars_export import Batcher, Limits, Session, SessionError


def test_counts_and_logs(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "mars_export")
    prompt = "a very secret prompt"
    with Batcher(session, Limits(max_rows=2)) as batcher:
        batcher.submit(prompt, SHORT, client="alice").result(SOON)
        left = batcher.submit(prompt, LONG, client="bob")
        left.cancel()
        bad = batcher.submit([3], LONG)
        bad.seq.stream = NoText(lambda token: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            bad.result(SOON)
        with pytest.raises(SessionError):
            batcher.submit(prompt + "\ud800", SHORT)
        counts = batcher.counts
    ended = (counts.finished, counts.cancelled, counts.failed, counts.refused)
    assert (counts.accepted, *ended) == (3, 1, 1, 1, 1) and counts.tokens >= 4
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
        "import sys; from mars_export import Batcher, Session\n"
        "with Batcher(Session.open(sys.argv[1], threads=1)) as b: b.submit([1])"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code, str(BUNDLE)], capture_output=True, env=env, timeout=120, check=True
    )
    assert (done.stdout, done.stderr) == (b"", b"")
