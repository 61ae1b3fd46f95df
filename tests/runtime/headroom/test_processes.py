"""Processes under real limits: steps take what was asked for and no more, the rest is refused in words."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from support.confined import confined
from support.limits import MB
from support.paths import BUNDLE

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
