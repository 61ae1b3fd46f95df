"""What limits leave is asked before what would end a process: refused in clear words, without one never."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.confined import confined
from support.paths import ROOT

from mars_export.runtime import SessionError, headroom, machine
from mars_export.runtime.bundle.manifest import ModelInfo
from mars_export.runtime.device.scratch import FIRST_GROWTH, Scratch, require_session

BUNDLE = ROOT / "tests" / "runtime" / "bundle" / "written-by-1.1"
MODEL = ModelInfo("llama", 32_000, 2048, 24, 16, 8, 128, 8192)
SIZES = st.tuples(st.integers(1, 8), st.integers(1, 256), st.integers(1, 64), st.integers(1, 16))
MB = 1 << 20


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


def left(limits: dict[int, int], kind: int, pages: int, bytes_left: int) -> None:
    limits[kind] = pages * resource.getpagesize() + bytes_left


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


def step(scratch: Scratch, *size: int) -> None:
    """One that is let through, or not, and ends well."""
    with scratch.step(*size):
        pass


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


def test_many_sizes_are_forgotten_but_never_believed() -> None:
    scratch = Scratch(MODEL, 8192, 0)
    for i in range(1, 200):
        scratch._keep((i, 200 - i, 1), 0)
    assert len(scratch._ran) <= 16
    assert scratch._has_run((199, 1, 1)) and not scratch._has_run((199, 2, 1))


BOUNDS = """
import resource, sys
if sys.argv[2] == "first":
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
from mars_export.runtime import Session
from mars_export.runtime import headroom
import numpy as np
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmPeak"))
session = Session.open(sys.argv[1], threads=1, cache_bytes=0)
backend, vocabulary = session.backend, session.bundle.manifest.model.vocab_size
scratch, needs = backend._scratch, []
assert scratch._arena == (sys.argv[2] == "later")
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
known = np.random.default_rng(0)
headroom.require = lambda num_bytes, *_, **__: needs.append(num_bytes)
most = 0
for _ in range(150):
    rows, slots = int(known.integers(1, 9)), int(known.integers(1, 200))
    cache = backend.new_cache(rows)
    cache.reserve(int(known.integers(slots, 3000)))
    ids = known.integers(1, vocabulary, (rows, slots))
    first = np.zeros(rows, np.int64)
    index = np.zeros((rows, int(known.integers(1, min(slots, 16) + 1))), np.int64)
    needs.clear()
    before, highest = headroom.address_space(), peak()
    backend.step(cache, 0, ids, first, index, False)
    grown = max(headroom.address_space(), peak() if peak() > highest else 0) - before
    assert grown <= needs[-1] + headroom.RESERVE, (rows, slots, cache.capacity, grown, needs)
    most = max(most, grown)
print(most)
"""


@pytest.mark.parametrize("limit", ["first", "later"])
def test_steps_take_no_more_than_is_asked_for(limit: str) -> None:
    """150 steps of all sizes against the sum that stands before each."""
    done = subprocess.run(
        [sys.executable, "-c", BOUNDS, str(BUNDLE), limit], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > MB


UNDER = """
from mars_export.runtime import Session, SessionError
from mars_export.runtime import headroom
import onnxruntime
session = Session.open(sys.argv[1], threads=1, cache_bytes=0)
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (headroom.address_space() + int(sys.argv[2]) * 2**20, before[1]))
try:
    print(eval(sys.argv[3]))
except SessionError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, before)
"""


@pytest.mark.parametrize(
    ("megabytes", "what", "said"),
    [
        (12, "Session.open(sys.argv[1], threads=1).backend.max_slots", "opening this model needs about"),
        (20, "len(session.text.encode('word ' * 12000))", "a prompt of 60000 characters needs about"),
        (
            60,
            "session.backend.new_cache(64).reserve(60000)",
            "KV memory of 64 row.s. of .* entries needs about",
        ),
        (3, "session.generate([5, 6, 7])", "a step of 1 x .* slots needs about|KV memory of 1 row"),
        (60, "len(session.text.encode('word ' * 10))", r"^\d+$"),
    ],
)
def test_what_takes_too_much_is_refused_in_clear_words(megabytes: int, what: str, said: str) -> None:
    words = confined(UNDER, str(BUNDLE), str(megabytes), what)
    assert re.search(said, words), words


def test_a_process_that_has_no_room_for_the_library_says_so() -> None:
    program = UNDER.replace(
        "import onnxruntime\nsession = Session.open(sys.argv[1], threads=1, cache_bytes=0)\n", ""
    )
    assert "opening this model needs about" in confined(
        program, str(BUNDLE), "40", "Session.open(sys.argv[1], threads=1)"
    )


def group(place: Path, limit: str, used: int, cached: int, swap: str = "max") -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "memory.max").write_text(f"{limit}\n")
    (place / "memory.current").write_text(f"{used}\n")
    (place / "memory.swap.max").write_text(f"{swap}\n")
    (place / "memory.stat").write_text(f"anon 5\nactive_anon 7\ninactive_file {cached - 1}\nactive_file 1\n")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemAvailable: 4000 kB\nSwapFree: 0 kB\n")
    (tmp_path / "own").write_text("0::/service/one\n")
    return tmp_path


def test_the_tightest_group_above_counts_and_files_in_memory_are_free(groups: Path) -> None:
    assert machine.group_left() is None
    assert machine.available() == 4000 * 1024
    group(groups / "cgroup" / "service" / "one", "max", 10, 4)
    assert machine.group_left() is None
    group(groups / "cgroup" / "service", "1000", 900, 300)
    assert machine.group_left() == 1000 - 900 + 300
    group(groups / "cgroup" / "service" / "one", "500", 450, 10)
    assert machine.group_left() == machine.available() == 60
    (groups / "meminfo").write_text("SwapFree: 1 kB\n")
    assert machine.group_left() == 60 + 1024
    group(groups / "cgroup" / "service" / "one", "500", 450, 10, swap="7")
    assert machine.group_left() == 67


def test_a_container_sees_its_group_as_the_root_and_may_not_know_its_name(groups: Path) -> None:
    group(groups / "cgroup", "1000", 400, 100)
    assert machine.group_left() == 700
    (groups / "own").write_text("0::/\n")
    assert machine.group_left() == 700


def test_groups_of_the_first_kind(groups: Path) -> None:
    (groups / "own").write_text("9:name=systemd:/x\n4:cpu,memory:/a/b\n0::/\n")
    place = groups / "cgroup" / "memory" / "a"
    place.mkdir(parents=True)
    (place / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (place / "memory.usage_in_bytes").write_text("600\n")
    (place / "memory.stat").write_text(
        "inactive_file 1\nactive_file 2\ntotal_inactive_file 30\ntotal_active_file 20\n"
    )
    assert machine.group_left() is None
    (place / "memory.limit_in_bytes").write_text("1000\n")
    assert machine.group_left() == 1000 - 600 + 50


FREED = """
import ctypes
from mars_export.runtime import headroom
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
if sys.argv[1] == "returned":
    headroom.return_freed()
libc.free(libc.malloc(30 << 20))
before = headroom.address_space()
large = [libc.malloc(1 << 20) for _ in range(16)]
small = libc.malloc(1 << 10)  # lies behind them
for block in large:
    libc.free(block)
print(headroom.address_space() - before)
"""


@pytest.mark.parametrize("how", ["kept", "returned"])
def test_under_a_limit_what_is_freed_goes_back_at_once(how: str) -> None:
    held = int(confined(FREED, how))
    assert held < MB if how == "returned" else held > 8 * MB


QUIET = """
import os
from mars_export.runtime import Session
import tokenizers, numpy
before = set(os.listdir("/proc/self/task"))
session = Session.open(sys.argv[1], threads=1, cache_bytes=0)
session.generate([5, 6, 7])
print(os.environ["ORT_DISABLE_TELEMETRY"], len(set(os.listdir("/proc/self/task")) - before))
"""


def test_the_library_starts_no_threads_that_tell_others_what_it_runs() -> None:
    """They took 24 MB now and then under a limit, or ended the process."""
    assert confined(QUIET, str(BUNDLE)).split() == ["1", "0"]
