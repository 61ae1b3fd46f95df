"""What the runtime's fixed choices cost: KV capacity that is not used yet, the prefill chunk, and how ONNX Runtime's threads wait.

    python benchmarks/settings.py BUNDLE [--rounds 10] [--json FILE]

Rounds are interleaved over all settings; figures are medians (smallest) in milliseconds. Capacity: a step of one row at cursor 100 in KV
memory of so many entries, and allocating it and growing once. Prefill: a prompt of 480 tokens in chunks. Threads: a step at cursor
100 by number of threads, with threads that spin while they wait (ONNX Runtime's default) or sleep; CPU time beside wall time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from step import Times

from mars_export.runtime import Session
from mars_export.runtime.decode.backend import Backend, bucket

CURSOR, PROMPT = 100, 480
CAPACITIES = (128, 256, 512, 1024, 2048)
CHUNKS = (32, 64, 128, 256, PROMPT)
SLOTS = (1, 8)
THREADS = (1, 2, 4)


def step_of(backend: Backend, slots: int, capacity: int) -> Callable[[], object]:
    cache = backend.new_cache(1)
    cache.reserve(capacity)
    ids, index = np.full((1, slots), 5, np.int64), np.arange(slots, dtype=np.int64)[None]
    return lambda: backend.step(cache, 0, ids, np.array([CURSOR], np.int64), index, False)


def growth_of(backend: Backend, capacity: int) -> Callable[[], object]:
    """Allocating KV memory and then growing it once: what is copied is less than this."""

    def grow() -> None:
        cache = backend.new_cache(1)
        cache.reserve(capacity)
        cache.reserve(bucket(capacity + 1, capacity))

    return grow


def prefill_of(backend: Backend, chunk: int) -> Callable[[], object]:
    ids = np.arange(PROMPT, dtype=np.int64)[None] % 200 + 1

    def prefill() -> None:
        cache = backend.new_cache(1)
        cache.reserve(PROMPT)
        for start in range(0, PROMPT, chunk):
            part = ids[:, start : start + chunk]
            backend.step(cache, 0, part, np.array([start], np.int64), np.array([[part.shape[1] - 1]]), False)

    return prefill


def opened(path: Path, threads: int, spins: bool) -> Backend:
    """A session whose threads wait as asked; the runtime itself leaves ONNX Runtime's default."""
    plain = onnxruntime.SessionOptions

    def options() -> Any:
        made = plain()
        made.add_session_config_entry("session.intra_op.allow_spinning", "1" if spins else "0")
        return made

    onnxruntime.SessionOptions = options
    try:
        return Session.open(path, threads=threads).backend
    finally:
        onnxruntime.SessionOptions = plain


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    backends = {
        (threads, spins): opened(args.bundle, threads, spins)
        for threads in THREADS
        for spins in (True, False)
    }
    usual = backends[2, True]
    works: dict[str, Callable[[], object]] = {}
    for capacity in CAPACITIES:
        works |= {f"capacity {capacity}, {slots} slots": step_of(usual, slots, capacity) for slots in SLOTS}
        works[f"new memory of {capacity}, grown once"] = growth_of(usual, capacity)
    works |= {f"prefill of {PROMPT} by {chunk}": prefill_of(usual, chunk) for chunk in CHUNKS}
    for (threads, spins), backend in backends.items():
        waits = "spinning" if spins else "sleeping"
        works |= {
            f"{threads} threads {waits}, {slots} slots": step_of(backend, slots, 256) for slots in SLOTS
        }
    times = {name: Times() for name in works}
    for _ in range(args.rounds):
        for name, work in works.items():
            work()
            for _ in range(1 if "prefill" in name else 3):
                times[name].measure(work)
    summaries = {name: each.summary() for name, each in times.items()}
    for name, found in summaries.items():
        print(f"{name:44} {found['median']:8.1f} ({found['smallest']:.1f}, cpu {found['smallest_cpu']:.1f})")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        values = {
            "bundle": args.bundle.name,
            "rounds": args.rounds,
            "cursor": CURSOR,
            "prompt": PROMPT,
            "ms": summaries,
        }
        args.json.write_text(json.dumps(values, indent=2) + "\n")


if __name__ == "__main__":
    main()
