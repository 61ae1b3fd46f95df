"""What limits leave is asked before what would end a process: refused in clear words, without one never."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from support.limits import MB, MODEL, left, step

from mars_export.runtime import SessionError, headroom, machine
from mars_export.runtime.device.scratch import Scratch, require_session


@pytest.mark.usefixtures("limits")
def test_without_a_limit_nothing_is_refused_and_nothing_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headroom, "STATM", Path("/nowhere"))
    headroom.require(1 << 50, "all", "less", stacks=1 << 50, code=1 << 50)
    require_session(MODEL, 1 << 50, "float32", 1000, loaded=False)
    step(Scratch(MODEL, 8192, 0), 1000, 10**6, 10**6, 1000)


def test_a_limit_says_how_much_is_missing_of_what_and_what_to_do(limits: dict[int, int]) -> None:
    left(limits, resource.RLIMIT_AS, 1000, 30 * MB)
    headroom.require(26 * MB, "this", "that")
    with pytest.raises(SessionError) as told:
        headroom.require(26 * MB + 1, "the thing", "do without")
    words = (
        "the thing needs about 32 MB, and the limit on this process's address space .ulimit -v. leaves 31 MB"
    )
    assert told.match(f"^not enough memory: {words}; raise it, or do without$")
    headroom.require(6 * MB, "this", "that", stacks=10 * MB, code=10 * MB)
    for stacks, code in ((11, 10), (10, 11)):
        with pytest.raises(SessionError, match="ulimit -v"):
            headroom.require(6 * MB, "this", "that", stacks=stacks * MB, code=code * MB)


def test_code_is_no_data_and_stacks_are(limits: dict[int, int]) -> None:
    left(limits, resource.RLIMIT_DATA, 200, 30 * MB)
    headroom.require(20 * MB, "this", "that", code=1 << 50)
    with pytest.raises(SessionError, match="data .ulimit -d. leaves 31 MB"):
        headroom.require(20 * MB, "this", "that", stacks=7 * MB)


def test_a_limit_below_what_is_held_leaves_nothing(limits: dict[int, int]) -> None:
    left(limits, resource.RLIMIT_AS, 0, 1)
    with pytest.raises(SessionError, match="leaves 0 MB"):
        headroom.require(0, "this", "that")


@pytest.mark.usefixtures("limits")
def test_a_control_group_is_asked_for_what_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "group_left", lambda: 10 * MB)
    headroom.require(headroom.LARGE - 1, "this", "that", stacks=1 << 40)
    with pytest.raises(SessionError, match="control group or container leaves 10 MB"):
        headroom.require(headroom.LARGE, "this", "that")
    monkeypatch.setattr(machine, "group_left", lambda: 21 * MB)
    headroom.require(headroom.LARGE, "this", "that", stacks=1 << 40)


def test_opening_counts_weights_the_vocabulary_threads_and_the_library(limits: dict[int, int]) -> None:
    def least(*, threads: int = 1, weights: int = 0, loaded: bool = True) -> int:
        low, high = 0, 1 << 36
        while low < high:
            middle = (low + high) // 2
            left(limits, resource.RLIMIT_AS, 1000, middle)
            try:
                require_session(MODEL, weights, "float32", threads, loaded=loaded)
                high = middle
            except SessionError:
                low = middle + 1
        return low

    assert least() > 4 * 32_000 * 2048
    assert least(threads=5) - least() == 4 * 8 * MB
    assert least(loaded=False) - least() == 48 * MB
    assert 1.05e9 < least(weights=10**9) - least() < 1.2e9


def test_a_forked_process_has_nothing_that_ran_elsewhere(limits: dict[int, int]) -> None:
    left(limits, resource.RLIMIT_AS, 1000, 30 * MB)
    with headroom.granted(20 * MB, "this", "that"):
        child = os.fork()
        if child == 0:
            try:
                headroom.require(20 * MB, "this", "that")
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
