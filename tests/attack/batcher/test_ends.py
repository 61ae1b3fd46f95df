"""The end of a batcher: it is closed, drained, forked, or its program ends while it runs."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading

import pytest
from support.batchers import LONG, SHORT, goes_on
from support.paths import BUNDLE
from support.stalling import Stalling

from mars_export import Batcher, Limits, Session, SessionError

ENDS = """
import sys, threading
from mars_export import Batcher, GenerationConfig, Session
session = Session.open(sys.argv[1], threads=1)
batcher = Batcher(session)
requests = [batcher.submit([i + 1] * 40, GenerationConfig(tau=1.0, max_new_tokens=400, eos_ids=()))
            for i in range(20)]
next(iter(requests[0]))
end = {"return": lambda: None, "exit": lambda: sys.exit(3), "error": lambda: 1 / 0}[sys.argv[2]]
end()
"""


@pytest.mark.parametrize("how", ["return", "exit", "error"])
def test_a_program_may_end_while_a_batcher_runs(how: str) -> None:
    codes = []
    for _ in range(4):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", ENDS, str(BUNDLE), how],
                stderr=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            for _ in range(2)
        ]
        for process in processes:
            _, said = process.communicate(timeout=120)
            codes.append(process.returncode)
            assert b"terminate called" not in said
    assert codes == [{"return": 0, "exit": 3, "error": 1}[how]] * 8


@pytest.mark.parametrize("drain", [60, True])
def test_closing_may_wait_for_what_is_there(session: Session, drain: float) -> None:
    batcher = Batcher(session, Limits(max_rows=2))
    requests = [batcher.submit([i + 1], SHORT) for i in range(6)]
    assert batcher.close(drain=drain)
    assert [request.result(0).finish_reason for request in requests] == ["length"] * 6
    assert batcher.num_running == batcher.num_waiting == 0
    with pytest.raises(SessionError, match="this batcher is closed"):
        batcher.submit([1], SHORT)


def test_a_drain_has_an_end(stalled: tuple[Batcher, Stalling], caplog: pytest.LogCaptureFixture) -> None:
    batcher, _ = stalled
    request = batcher.submit([1], LONG)
    with caplog.at_level(logging.WARNING, "mars_export"):
        assert not batcher.close(drain=0.05, timeout=0.05)
    assert request.result(0).finish_reason == "cancelled"
    assert "batcher closing: 1 requests cancelled" in caplog.text
    assert "a step has been hanging" in caplog.text


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_told_to_make_its_own(batcher: Batcher) -> None:
    """While another thread holds the batcher's lock."""
    request, is_held, may_go = batcher.submit([2], LONG), threading.Event(), threading.Event()

    def hold() -> None:
        with batcher._changed:
            is_held.set()
            may_go.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            request.cancel()
            batcher.submit([1], SHORT)
        except SessionError as error:
            os._exit("its process was forked" not in str(error))
        os._exit(2)
    may_go.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0
    assert goes_on(batcher), "the parent's batcher is as it was"
