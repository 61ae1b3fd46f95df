"""A batcher with concurrent requests in a process that may take so much memory more and not a byte: every
answer is right or a clear error, and no run ends by a signal.

PYTHONPATH=benchmarks python -m attack.memory --runs 100 --state memory.jsonl      # resumable
PYTHONPATH=benchmarks python -m attack.memory --runs 40 --runner cpp build/cpp/release/mars-run

A run is a seed: the limit (address space or data, set before or after the bundle is opened) and how much is
given; with `--runner cpp` it is libmars's program on one long prompt (memory_cpp.py). The state has one JSON
line for each; what is wrong is printed. Without a bundle a small random model is made.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attack import memory_cpp
from attack.kills import ended, fork, kill
from attack.schemas import small_bundle
from mars_export.runtime import Batcher, GenerationConfig, Limits, MarsError, Session

CLIENTS, EACH, ROWS = 8, 4, 4
STEP = 2 << 20  # bytes from four seeds to the next four
LONGEST = 180.0  # seconds of a run
LIMITS = {"address space": (resource.RLIMIT_AS, "VmSize"), "data": (resource.RLIMIT_DATA, "VmData")}


def questions(vocabulary: int) -> list[list[int]]:
    """What each client asks, in turn."""
    draw = random.Random(0)
    lengths = [draw.choice((5, 90, 450)) for _ in range(CLIENTS * EACH)]
    return [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]


def config() -> GenerationConfig:
    return GenerationConfig(tau=1.0, max_new_tokens=24, eos_ids=())


def opened(bundle: Path) -> Session:
    return Session.open(bundle, threads=1, cache_bytes=0)


def answers(bundle: Path) -> list[list[int]]:
    """The answers without a limit, one after the other."""
    session = opened(bundle)
    asked = questions(session.bundle.manifest.model.vocab_size)
    return [list(session.generate(ids, config()).token_ids) for ids in asked]


def limit(what: str, more: int) -> Callable[[], None]:
    """Let this process take `more` bytes and no others; returns what lifts that."""
    number, name = LIMITS[what]
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    now = next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
    before = resource.getrlimit(number)
    resource.setrlimit(number, (now + more, before[1]))
    return lambda: resource.setrlimit(number, before)


def served(bundle: Path, seed: int, wanted: list[list[int]]) -> dict[str, Any]:
    """A run: what the clients got, as counts; `wrong` are answers and errors that should not be."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    gate, batchers = threading.Event(), list[Batcher]()

    def failed(error: BaseException) -> None:
        if isinstance(error, MarsError | MemoryError):
            counts["MemoryError" if isinstance(error, MemoryError) else "errors"] += 1
        else:
            wrong.append(f"{type(error).__name__}: {error!s:.300}")

    def client(number: int) -> None:
        gate.wait()
        for i in range(number * EACH, (number + 1) * EACH) if batchers else ():
            try:
                got = batchers[0].submit(asked[i], config()).result(LONGEST)
                if list(got.token_ids) == wanted[i]:
                    counts["right"] += 1
                else:
                    wrong.append(f"request {i}: another answer")
            except BaseException as error:
                failed(error)

    # Their stacks are there before the limit.
    threads = [threading.Thread(target=client, args=(i,)) for i in range(CLIENTS)]
    for thread in threads:
        thread.start()
    what, is_late, more = kind_of(seed)
    session = opened(bundle) if is_late else None
    asked = questions(session.bundle.manifest.model.vocab_size if session else vocabulary_of(bundle))
    lift = limit(what, more)
    try:
        batchers.append(Batcher(session or opened(bundle), Limits(max_rows=ROWS)))
    except BaseException as error:
        failed(error)
    gate.set()
    for thread in threads:
        thread.join()
    try:
        for batcher in batchers:
            batcher.close()
    except BaseException as error:
        failed(error)
    lift()
    return {"counts": dict(counts), "wrong": wrong}


def vocabulary_of(bundle: Path) -> int:
    return int(json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))["model"]["vocab_size"])


def kind_of(seed: int) -> tuple[str, bool, int]:
    """The limit of a run, whether the bundle is opened before it, and the bytes that are given."""
    return list(LIMITS)[seed % 2], seed % 4 >= 2, seed // 4 * STEP


def run(bundle: Path, seed: int, wanted: list[list[int]]) -> dict[str, Any]:
    what, is_late, more = kind_of(seed)
    line: dict[str, Any] = {"seed": seed, "limit": what, "opened before": is_late, "bytes": more}
    with tempfile.NamedTemporaryFile() as file:
        path = Path(file.name)
        pid = fork(lambda: _put(path, served(bundle, seed, wanted)))
        code = ended(pid, LONGEST)
        if code is None:
            kill(pid)
        if code != 0:
            return line | {"counts": {}, "wrong": ["hang" if code is None else f"ended with {code}"]}
        return line | json.loads(path.read_text(encoding="utf-8"))


def _put(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def made(place: Path) -> Path:
    """A small bundle, by a process of its own."""
    if ended(fork(lambda: shutil.copytree(small_bundle(), place / "bundle") and None), LONGEST) != 0:
        raise SystemExit("no bundle can be made")
    return place / "bundle"


def without_limit(bundle: Path) -> list[list[int]]:
    """The answers, by a process of their own: this one opens no session, so that it can be forked."""
    with tempfile.NamedTemporaryFile() as file:
        path = Path(file.name)
        if ended(fork(lambda: _put(path, answers(bundle))), LONGEST) != 0:
            raise SystemExit("the answers without a limit cannot be had")
        found: list[list[int]] = json.loads(path.read_text(encoding="utf-8"))
        return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, help="a small one, fp32")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--state", type=Path, help="JSON lines; only what was wrong is done again")
    parser.add_argument(
        "--runner", nargs=2, metavar=("cpp", "PATH"), help="mars-run in place of Python's batcher"
    )
    args = parser.parse_args()
    if args.runner and args.runner[0] != "cpp":
        parser.error("--runner: the one there is is cpp, with the path of mars-run")
    lines: dict[int, dict[str, Any]] = {}
    if args.state is not None and args.state.exists():
        read = map(json.loads, args.state.read_text(encoding="utf-8").splitlines())
        lines = {line["seed"]: line for line in read}
    with tempfile.TemporaryDirectory(prefix="attack-") as place:
        bundle = args.bundle or made(Path(place))
        program = memory_cpp.Program(Path(args.runner[1]), bundle) if args.runner else None
        wanted = [] if program else without_limit(bundle)
        for seed in range(args.first, args.first + args.runs):
            if seed in lines and not lines[seed]["wrong"]:
                continue
            lines[seed] = program.run(seed, args.runs) if program else run(bundle, seed, wanted)
            if args.state is not None:
                with args.state.open("a", encoding="utf-8") as state:
                    state.write(json.dumps(lines[seed]) + "\n")
            for words in lines[seed]["wrong"]:
                print(f"run {seed}: {words}", flush=True)
    counts: Counter[str] = Counter()
    for line in lines.values():
        counts.update(line["counts"])
    wrong = sum(bool(line["wrong"]) for line in lines.values())
    whole = 1 if args.runner else CLIENTS * EACH
    served_all = sum(line["counts"].get("right") == whole for line in lines.values())
    print(f"{len(lines)} runs: {dict(counts)}; {served_all} with all answers; {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
