"""libmars in a process that may take so much memory and not a byte more: right answers or clear errors,
never a signal.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from support.cabi import build
from support.confined import confined
from support.paths import BUNDLE

ASKED = ("--token-ids", "--prompt", " ".join(["5 6 7 8"] * 40), "--max-new-tokens", "24", "--window", "full")
LIMITS = {"address space": resource.RLIMIT_AS, "data": resource.RLIMIT_DATA}
SAYS = re.compile(r"^error: .*not enough memory.*; .*$", re.MULTILINE)
MB = 1 << 20
MEMORY = 4  # MARS_ERROR_MEMORY


def run(*arguments: str, kind: int, most: int) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(kind, (most, most))

    words = [str(build() / "mars-run"), *arguments]
    return subprocess.run(
        words, preexec_fn=limit, capture_output=True, text=True, timeout=60, check=False, errors="replace"
    )


@pytest.mark.parametrize("what", LIMITS)
def test_every_limit_ends_in_the_answer_or_in_clear_words(what: str) -> None:
    """Limits from where the program itself can start to where everything fits."""
    kind = LIMITS[what]
    asked = (str(BUNDLE), *ASKED, "--threads", "1", "--json")
    wanted = json.loads(run(*asked, kind=kind, most=4 << 30).stdout)["token_ids"]
    start = next(n for n in range(256) if run("--version", kind=kind, most=n * MB).returncode == 0)
    counts: Counter[str] = Counter()
    for more in (1, 2, 3, 4, 6, 8, 10, 14, 18, 22, 24, 26, 28, 30, 34, 40, 60, 100):
        done = run(*asked, kind=kind, most=(start + more) * MB)
        if done.returncode == 0:
            assert json.loads(done.stdout)["token_ids"] == wanted
            counts["right"] += 1
        else:
            assert done.returncode == 1, (more, done.returncode, done.stderr)
            assert SAYS.search(done.stderr), (more, done.stderr)
            assert "bad_alloc" not in done.stderr or "ONNX Runtime" in done.stderr, (more, done.stderr)
            counts["refused"] += 1
    assert counts["right"] > 1
    assert counts["refused"] > 4


def test_the_words_are_those_of_python() -> None:
    done = run(str(BUNDLE), *ASKED, "--threads", "1", kind=resource.RLIMIT_AS, most=46 * MB)
    words = (
        r"error: not enough memory: opening this model needs about \d+ MB, and the limit on this process's"
        r" address space \(ulimit -v\) leaves \d MB; raise it, or use a model of fewer or smaller weights\n"
    )
    assert re.fullmatch(words, done.stderr), done.stderr


THREADS = """
import json, threading
sys.path.insert(0, sys.argv[3])
from support.cabi import CSession, Library, MarsStatusError, build
library = Library(build() / "libmars.so")
def space():
    return int(open("/proc/self/statm").read().split()[0]) * 4096
def opened():
    return CSession(library, sys.argv[1], threads=1, cache_bytes=0)
asked = [[5, 6, 7, 8] * length for length in (2, 20, 60, 110)]
def answer(session, ids):
    return session.generate(ids, tau=1.0, window="full", max_new_tokens=16, eos_ids=[]).token_ids
free = opened()
wanted = [answer(free, ids) for ids in asked]
counts = {}
before = resource.getrlimit(resource.RLIMIT_AS)
for more in json.loads(sys.argv[2]):
    right, short, wrong = [], [], []
    def client(session, number):
        for ids, good in list(zip(asked, wanted))[number % 2 ::2] * 3:
            try:
                (right if answer(session, ids) == good else wrong).append(number)
            except MarsStatusError as error:
                (short if "not enough memory" in str(error) else wrong).append(str(error))
    for session in (free, None):
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, before[1]))
        session = session or opened()  # without an arena
        gate = threading.Barrier(5)
        def begun(session=session, number=0):
            gate.wait()
            client(session, number)
        threads = [threading.Thread(target=begun, args=(session, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        resource.setrlimit(resource.RLIMIT_AS, (space() + more * 2**20, before[1]))
        gate.wait()
        for thread in threads:
            thread.join()
    resource.setrlimit(resource.RLIMIT_AS, before)
    counts[more] = (len(right), len(short), wrong[:3])
print(json.dumps(counts))
"""


def test_threads_that_step_at_once_under_a_limit() -> None:
    """Four of them on sessions with an arena and without: none takes what another was granted."""
    limits = (0, 4, 8, 12, 16, 20, 24, 32, 48, 64, 400)
    words = confined(THREADS, str(BUNDLE), json.dumps(limits), str(Path(__file__).parents[2]), gigabytes=4.0)
    counts = json.loads(words)
    assert not [wrong for _, _, wrong in counts.values() if wrong], counts
    assert all(right + short == 48 for right, short, _ in counts.values()), counts
    assert counts["0"][1] > 0
    assert counts["400"][0] == 48


DEADLINE = """
sys.path.insert(0, sys.argv[2])
from support.cabi import CSession, Library, MarsStatusError, build
session = CSession(Library(build() / "libmars.so"), sys.argv[1], threads=1, cache_bytes=0)
before = resource.getrlimit(resource.RLIMIT_AS)
now = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (now + 2**20, before[1]))
try:
    session.generate([5, 6, 7], deadline=20.0)
except MarsStatusError as error:
    print(error.status, error)
resource.setrlimit(resource.RLIMIT_AS, before)
print(len(session.generate([5, 6, 7], deadline=20.0, max_new_tokens=3, eos_ids=[]).token_ids))
"""


def test_a_deadline_for_which_there_is_no_thread() -> None:
    """It was the words of the system, as a fault of the library."""
    said, tokens = confined(DEADLINE, str(BUNDLE), str(Path(__file__).parents[2])).splitlines()
    assert "the thread of a deadline cannot be started" in said
    assert said.startswith(f"{MEMORY} ")
    assert tokens == "3"
