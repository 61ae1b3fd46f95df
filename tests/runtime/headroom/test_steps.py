"""Memory of steps: what one needs, which have run, and what runs beside it."""

from __future__ import annotations

import resource
import threading
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.limits import MODEL, left, step

from mars_export.runtime import SessionError, headroom
from mars_export.runtime.device.scratch import FIRST_GROWTH, Scratch

SIZES = st.tuples(st.integers(1, 8), st.integers(1, 256), st.integers(1, 64), st.integers(1, 16))


def size_of(rows: int, slots: int, capacity: int, outputs: int) -> tuple[int, int, int]:
    return rows * slots, rows * slots * capacity, rows * outputs


@given(SIZES, SIZES)
def test_a_step_takes_at_most_what_a_larger_one_takes(
    one: tuple[int, int, int, int], more: tuple[int, int, int, int]
) -> None:
    scratch = Scratch(MODEL, 8192, 0)
    rows, slots, capacity, outputs = (a + b for a, b in zip(one, more, strict=True))
    larger = size_of(rows, slots, capacity, outputs)
    assert 0 < scratch.num_bytes(size_of(*one)) < scratch.num_bytes(larger)


def test_steps_no_larger_than_one_that_ran_need_what_an_arena_likes_to_take(limits: dict[int, int]) -> None:
    scratch = Scratch(MODEL, 8192, 0)
    step(scratch, 2, 64, 1024, 8)
    left(limits, resource.RLIMIT_AS, 1000, headroom.RESERVE + FIRST_GROWTH)
    for size in ((2, 64, 1024, 8), (1, 128, 1024, 8), (1, 1, 128, 1), (16, 8, 512, 1)):
        step(scratch, *size)
    for size in ((2, 64, 1025, 8), (1, 129, 1, 1), (1, 1, 128, 17), (3, 64, 128, 1)):
        with pytest.raises(SessionError, match=f"a step of {size[0]} x {size[1]} slots needs about"):
            step(scratch, *size)
    left(limits, resource.RLIMIT_AS, 1000, headroom.RESERVE + FIRST_GROWTH - 1)
    with pytest.raises(SessionError, match="a step of 1 x 1 slots"):
        step(scratch, 1, 1, 128, 1)


def test_a_step_that_failed_is_not_known(limits: dict[int, int]) -> None:
    scratch = Scratch(MODEL, 8192, 0)
    with pytest.raises(KeyError), scratch.step(2, 64, 1024, 8):
        raise KeyError
    left(limits, resource.RLIMIT_AS, 1000, headroom.RESERVE + FIRST_GROWTH)
    with pytest.raises(SessionError, match="a step of 2 x 64 slots"):
        step(scratch, 2, 64, 1024, 8)


def test_without_an_arena_every_step_needs_its_own(limits: dict[int, int]) -> None:
    scratch = Scratch(MODEL, 8192, 0, arena=False)
    needed = scratch.num_bytes((128, 128 * 1024, 16))
    for spare, is_enough in ((needed, True), (needed - 1, False), (needed, True)):
        left(limits, resource.RLIMIT_AS, 1000, headroom.RESERVE + spare)
        if is_enough:
            step(scratch, 2, 64, 1024, 8)
        else:
            with pytest.raises(SessionError, match="a step of 2 x 64 slots"):
                step(scratch, 2, 64, 1024, 8)


def test_what_runs_is_not_given_to_another(limits: dict[int, int]) -> None:
    """Neither another step of any session nor KV memory nor a prompt; what ends, well or not, gives back."""
    one, other = (Scratch(MODEL, 8192, 0, arena=False) for _ in range(2))
    needed = one.num_bytes(size_of(2, 64, 1024, 8))
    left(limits, resource.RLIMIT_AS, 1000, headroom.RESERVE + 2 * needed - 1)
    beside = f"leaves {(headroom.RESERVE + needed - 1) // 10**6} MB beside what runs already; raise it"
    for _ in range(3):
        with suppress(KeyError), one.step(2, 64, 1024, 8):
            with pytest.raises(SessionError, match=beside):
                step(other, 2, 64, 1024, 8)
            with pytest.raises(SessionError, match=beside):
                headroom.require(needed, "this", "that")
            step(other, 1, 64, 1024, 8)
            raise KeyError
        step(other, 2, 64, 1024, 8)
    left(limits, resource.RLIMIT_AS, 1000, headroom.RESERVE + 2 * needed)
    with one.step(2, 64, 1024, 8):
        step(other, 2, 64, 1024, 8)


def test_steps_in_threads_are_let_through_as_far_as_there_is_room(limits: dict[int, int]) -> None:
    scratch = Scratch(MODEL, 8192, 0, arena=False)
    needed = scratch.num_bytes(size_of(2, 64, 1024, 8))
    left(limits, resource.RLIMIT_AS, 1000, headroom.RESERVE + 3 * needed)
    at_once, most, refused = 0, 0, 0
    lock = threading.Lock()

    def steps() -> None:
        nonlocal at_once, most, refused
        for _ in range(50):
            try:
                with scratch.step(2, 64, 1024, 8):
                    with lock:
                        at_once += 1
                        most = max(most, at_once)
                    time.sleep(0.002)
                    with lock:
                        at_once -= 1
            except SessionError:
                refused += 1

    threads = [threading.Thread(target=steps) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 3 and refused > 0
    step(Scratch(MODEL, 8192, 0, arena=False), 6, 64, 1024, 8)  # nothing of them is left


def test_many_sizes_are_forgotten_but_never_believed() -> None:
    scratch = Scratch(MODEL, 8192, 0)
    for i in range(1, 200):
        scratch._keep((i, 200 - i, 1), 0)
    assert len(scratch._ran) <= 16
    assert scratch._has_run((199, 1, 1)) and not scratch._has_run((199, 2, 1))
