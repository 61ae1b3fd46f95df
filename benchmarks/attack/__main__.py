"""Attacks the runtime with hostile bundles. Allowed are only errors of mars-export: no crash, no hang, no
memory beyond what the files need, and no output to standard output.

python benchmarks/attack --trials 200000 --state attack.jsonl     # about an hour; resumable

Each trial is a seed: `--first SEED --trials 1` repeats it. The state has one JSON line for each. Failures are
printed, and repeated at the next start with the same state.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
BUNDLE = HERE.parents[1] / "tests" / "conformance" / "trace"
OURS = ("BundleError", "SessionError", "ran")
SLOW, DEAD, MEMORY = 5.0, 60.0, 1 << 30  # seconds of processor time, seconds of silence, bytes


def trials(good: Path, first: int, last: int) -> Iterator[dict[str, Any]]:
    """The outcome of each seed; a process that dies or hangs is one, and the next goes on behind it."""
    while first < last:
        begun = first
        with tempfile.TemporaryFile() as words:
            process = _started([str(good), str(first), str(last)], words)
            try:
                for line in _lines(process):
                    if "begin" in line:
                        begun = line["begin"]
                    else:
                        yield line
                        first = line["seed"] + 1
            except TimeoutError:
                yield {"seed": begun, "outcome": "hang"}
                first = begun + 1
            else:
                if process.wait():
                    how = f"process ended with {process.returncode}: {_last_line(words)}"
                    yield {"seed": begun, "outcome": how}
                    first = begun + 1
            finally:
                process.kill()
                process.wait()


def _started(arguments: list[str], words: IO[bytes]) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "attack.trial", *arguments],
        stdout=subprocess.PIPE,
        stderr=words,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


def _last_line(words: IO[bytes]) -> str:
    """What a process said last: the exception's line of a traceback."""
    words.seek(max(0, words.seek(0, os.SEEK_END) - 10_000))
    said = words.read().decode(errors="replace").strip()
    return said.rpartition("\n")[2][:500] or "not a word"


def _lines(process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Lines of JSON as they come. Raises TimeoutError when none comes for too long."""
    assert process.stdout is not None
    file, rest = process.stdout.fileno(), b""
    while True:
        if not select.select([file], [], [], DEAD)[0]:
            raise TimeoutError
        data = os.read(file, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from map(json.loads, lines)


def is_wrong(line: dict[str, Any]) -> bool:
    return line["outcome"] not in OURS or line.get("seconds", 0) > SLOW or line.get("bytes", 0) > MEMORY


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, default=BUNDLE, help="a good one, small")
    parser.add_argument("--trials", type=int, default=200_000)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--state", type=Path, help="JSON lines; only what was wrong is done again")
    args = parser.parse_args()
    done: dict[int, dict[str, Any]] = {}
    if args.state is not None and args.state.exists():
        lines = args.state.read_text(encoding="utf-8").splitlines()
        done = {line["seed"]: line for line in map(json.loads, lines)}
    again = [(seed, seed + 1) for seed, line in done.items() if is_wrong(line)]
    first = max([args.first, *(seed + 1 for seed in done)])
    with open(args.state or os.devnull, "a", encoding="utf-8", buffering=1) as state:
        for start, end in [*again, (first, args.first + args.trials)]:
            for line in trials(args.bundle, start, end):
                state.write(json.dumps(line) + "\n")
                done[line["seed"]] = line
                if is_wrong(line):
                    print(json.dumps(line), flush=True)
    counts = Counter(line["outcome"].partition(":")[0] for line in done.values())
    wrong = sum(map(is_wrong, done.values()))
    summary = ", ".join(f"{n} {what}" for what, n in counts.most_common())
    print(f"{counts.total()} bundles: {summary}; {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
