"""Rounds of load for hours, with cancels, bad input, slow readers, changes of tau, grammars and deadlines.

PYTHONPATH=benchmarks python -m attack.soak --seconds 7200 --state soak.jsonl --figures soak.json  # resumable
PYTHONPATH=benchmarks python -m attack.soak --rounds 400 --state load.jsonl --figures load.json

A round is a seed: `--first SEED --rounds 1` repeats it. The state has one JSON line for each round. Failures
are printed; sums and the memory of every minute are written to the figures. Without a bundle, a small random
model with logits is created.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attack.load import Tally, exact_session, play
from attack.schemas import small_bundle
from mars_export.runtime.machine import resident

SUMS = ("whole", "ties", "begun", "refused", "overloaded", "tokens", "seconds")
MIB = 1 << 20


def rounds(
    bundle: Path, seeds: Iterator[int], requests: int, seconds: float, process: int
) -> Iterator[dict[str, Any]]:
    """The line of each round, until `seconds` have gone by."""
    session, begun = exact_session(bundle), time.perf_counter()
    for seed in seeds:
        if (start := time.perf_counter()) - begun > seconds:
            return
        tally = play(session, seed, requests)
        line = {"round": seed, "process": process}
        line |= {name: getattr(tally, name) for name in Tally.__slots__}
        yield line | {
            "seconds": round(time.perf_counter() - start, 3),
            "bytes": resident(),
            "threads": threading.active_count(),
        }


def sum_up(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all rounds. `mebibytes`: at the end of each minute of the last process; `growth`: MiB an
    hour over its second half, None when it did not last for four minutes.
    """
    sums: Counter[str] = Counter()
    for line in lines:
        sums.update({name: line.get(name, 0) for name in SUMS})
        sums["wrong"] += len(line["wrong"])
    last = [line for line in lines if line["process"] == lines[-1]["process"]]
    minutes, at = [last[0]["bytes"] / MIB], 0.0
    for line in last:
        at += line["seconds"]
        while at >= 60 * len(minutes):
            minutes.append(line["bytes"] / MIB)
    later = minutes[len(minutes) // 2 :]
    growth = 60 * (later[-1] - later[0]) / (len(later) - 1) if len(later) > 2 else None
    return {
        "rounds": len(lines),
        **sums,
        "processes": len({line["process"] for line in lines}),
        "mebibytes": [round(value, 1) for value in minutes],
        "growth": growth,
        "threads": max(line["threads"] for line in lines),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, help="a small one, fp32")
    parser.add_argument("--rounds", type=int, default=sys.maxsize)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of all rounds together")
    parser.add_argument("--requests", type=int, default=250, help="in each round")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--state", type=Path, help="JSON lines; rounds that are in it are not done again")
    parser.add_argument("--figures", type=Path, help="JSON: the sums of all rounds")
    args = parser.parse_args()
    if args.rounds == sys.maxsize and args.seconds == float("inf"):
        parser.error("give --rounds or --seconds")
    lines: list[dict[str, Any]] = []
    if args.state is not None and args.state.exists():
        lines = [json.loads(line) for line in args.state.read_text(encoding="utf-8").splitlines()]
    done = {line["round"] for line in lines}
    process = 1 + max((line["process"] for line in lines), default=0)
    left = args.seconds - sum(line["seconds"] for line in lines)
    seeds = (seed for seed in range(args.first, args.first + args.rounds) if seed not in done)
    for line in rounds(args.bundle or small_bundle(), seeds, args.requests, left, process):
        lines.append(line)
        if args.state is not None:
            with args.state.open("a", encoding="utf-8") as state:
                state.write(json.dumps(line) + "\n")
        for words in line["wrong"]:
            print(f"round {line['round']}: {words}", flush=True)
        if args.figures is not None:
            args.figures.write_text(json.dumps(sum_up(lines), indent=1) + "\n", encoding="utf-8")
    figures = sum_up(lines)
    print(json.dumps(figures))
    return int(figures["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
