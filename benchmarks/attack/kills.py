"""Writers of every command, killed at any time of their life or just when they write: whatever they wrote to
opens with all that was there before, and one start later nothing is left behind.

PYTHONPATH=benchmarks python -m attack.kills --kills 500 --state kills.jsonl             # resumable
PYTHONPATH=benchmarks python -m attack.kills --writers prefix --first SEED --kills 1

A trial is a writer and a seed. The state has one JSON line for each; what is wrong is printed. Writers are
forks of this process, which opens no session itself.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # of forks

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path.append(str(TESTS))

from support.fake_hub import TOKEN, fake_hub  # noqa: E402

from attack.writer import Writer  # noqa: E402
from attack.writers import WRITERS, Pull  # noqa: E402
from mars_export.runtime.machine import CACHE_VARIABLE  # noqa: E402

BUNDLE = TESTS / "runtime" / "bundle" / "written-by-1.1"
LONGEST = 60.0  # seconds that a writer may take


def fork(work: Callable[[], None]) -> int:
    """A process that does it and ends; its words go nowhere, its errors to this program's."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        faulthandler.enable()
        work()
        os._exit(0)
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(1)


def kill(pid: int) -> None:
    """End a process that `fork` made, and what it started; a fresh one has no group of its own yet."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def ended(pid: int, seconds: float) -> int | None:
    """The exit code of a fork, None when it still runs after so long."""
    until = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            return None
        time.sleep(0.0005)


def state_of(place: Path) -> frozenset[tuple[str, int, int]]:
    """What lies in a place, as far as a write shows."""
    found = set()
    for directory, _, names in os.walk(place):
        for name in [".", *names]:
            try:
                state = os.lstat(os.path.join(directory, name))
            except OSError:
                continue
            found.add((os.path.join(directory, name), state.st_size, state.st_mtime_ns))
    return frozenset(found)


def trial(writer: Writer, seed: int, usual: float) -> dict[str, Any]:
    """Start a writer and kill it; look; start it again and look for what is left."""
    draw = random.Random(seed)
    writer.begin(seed)
    place = writer.home.parent
    before = state_of(place)
    start = time.monotonic()
    pid = fork(lambda: writer.write(seed))
    if draw.random() < 0.5:
        how, code = "any time", ended(pid, draw.random() * 1.1 * usual)
    else:
        how, until = "at work", time.monotonic() + LONGEST
        while (code := ended(pid, 0.0)) is None and state_of(place) == before and time.monotonic() < until:
            pass
        if code is None:
            code = ended(pid, draw.random() ** 2 * draw.choice((0.003, 0.05, usual)))
    if code is None:
        kill(pid)
    seconds = time.monotonic() - start
    at_work = state_of(place) != before
    wrong = list(found(writer))
    again = fork(lambda: writer.finish(seed))
    if (after := ended(again, LONGEST)) != 0:
        wrong.append(f"the next start ended with {after}")
        if after is None:
            kill(again)
    else:
        wrong += found(writer, is_done=True)
    if code not in (None, 0):
        wrong.append(f"the writer itself ended with {code}")
    how = "done" if code == 0 else f"killed {how}, {'something' if at_work else 'nothing'} written"
    return {"writer": writer.name, "seed": seed, "how": how, "seconds": round(seconds, 3), "wrong": wrong}


def is_killed(line: dict[str, Any]) -> bool:
    return bool(line["how"].startswith("killed"))


def found(writer: Writer, is_done: bool = False) -> Iterator[str]:
    """What is wrong with the place; `is_done`: a writer came to its end there."""
    try:
        if not is_done:
            yield from writer.wrong()
            return
        there = {str(p.relative_to(writer.home)) for p in writer.home.rglob("*") if not p.is_dir()}
        hidden = [p for p in writer.home.parent.rglob(".*") if p.name != ".lock"]
        yield from (f"left behind: {name}" for name in sorted(there - writer.names()))
        yield from (f"left behind: {path.relative_to(writer.home.parent)}" for path in sorted(hidden))
    except Exception as error:
        yield f"{type(error).__name__}: {error}"


def usual_time(writer: Writer) -> float:
    """Seconds of a writer that nobody kills, the middle of three."""
    times = []
    for seed in range(1, 4):
        writer.begin(seed)
        start = time.monotonic()
        pid = fork(lambda seed=seed: writer.finish(seed))  # type: ignore[misc]
        if (code := ended(pid, LONGEST)) != 0:
            raise SystemExit(f"{writer.name}: a writer that nobody kills ended with {code}")
        times.append(time.monotonic() - start)
    return sorted(times)[1]


Lines = dict[tuple[str, int], dict[str, Any]]


def attack(names: list[str], first: int, kills: int, lines: Lines, good: Path) -> Iterator[dict[str, Any]]:
    """Trials until each writer was killed so often; what is in `lines` and was right is not done again."""
    with ExitStack() as stack:
        if "pull" in names:
            Pull.url = stack.enter_context(fake_hub()).url
            os.environ |= {"HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        for name in names:
            done = {seed for (writer, seed), line in lines.items() if writer == name and not line["wrong"]}
            left = kills - sum(is_killed(lines[name, seed]) for seed in done)
            if left <= 0:
                continue
            with tempfile.TemporaryDirectory(prefix="attack-") as place:
                os.environ[CACHE_VARIABLE] = str(Path(place, "cache"))
                os.environ["HF_HOME"] = str(Path(place, "cache", "hub"))
                writer = WRITERS[name](good, Path(place, "home"))
                usual = usual_time(writer)
                for seed in (seed for seed in count(first) if seed not in done):
                    line = trial(writer, seed, usual)
                    left -= is_killed(line)
                    if line["how"] == "done":  # the machine is quicker now than when it was measured
                        usual = 0.8 * usual + 0.2 * min(usual, line["seconds"])
                    yield line
                    if left <= 0:
                        break
                    if line["wrong"]:
                        writer.renew()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, default=BUNDLE, help="a good one, small")
    parser.add_argument("--writers", nargs="+", choices=list(WRITERS), default=list(WRITERS))
    parser.add_argument("--kills", type=int, default=500, help="of each; who comes to its end is not counted")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--state", type=Path, help="JSON lines; only what was wrong is done again")
    args = parser.parse_args()
    lines: Lines = {}
    if args.state is not None and args.state.exists():
        for line in map(json.loads, args.state.read_text(encoding="utf-8").splitlines()):
            lines[line["writer"], line["seed"]] = line
    with open(args.state or os.devnull, "a", encoding="utf-8", buffering=1) as state:
        for line in attack(args.writers, args.first, args.kills, lines, args.bundle):
            state.write(json.dumps(line) + "\n")
            lines[line["writer"], line["seed"]] = line
            for words in line["wrong"]:
                print(f"{line['writer']} {line['seed']}, {line['how']}: {words}", flush=True)
    for name in args.writers:
        of_it = [line for (writer, _), line in lines.items() if writer == name]
        counts = Counter(line["how"] for line in of_it)
        summary = ", ".join(f"{n} {how}" for how, n in counts.most_common())
        print(f"{name}: {len(of_it)} writers: {summary}; {sum(bool(line['wrong']) for line in of_it)} wrong")
    return int(any(line["wrong"] for line in lines.values()))


if __name__ == "__main__":
    sys.exit(main())
