"""Measures prompts and decode steps by the length of their context. Rounds are interleaved over all bundles.

    python benchmarks/contexts.py w8a8.bundle int8.bundle int8.bundle@0

`BUNDLE@SET` opens a bundle with an instruction set of mars-export-kernels, such as avx2; `@0` without the
package. Prompts are tokens a second, steps milliseconds: medians, in brackets the best.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from mars_export import Session
from mars_export.runtime.decode.backend import Backend, Cache, StepInput
from mars_export.runtime.device.ort import kernels

PROMPTS, CURSORS, SLOTS, PIECE = (128, 1000, 4000), (1000, 4000, 7500), (1, 8), 256
REPEATS = 5  # of a step in a round


def opened(name: str, threads: int) -> Backend:
    path, _, instructions = name.partition("@")
    os.environ.pop(kernels.VARIABLE, None)
    if instructions:
        os.environ[kernels.VARIABLE] = instructions
    return Session.open(Path(path), threads=threads, cache_bytes=0).backend


def step(backend: Backend, cache: Cache, cursor: int, slots: int) -> None:
    ids = 100 + np.arange(cursor, cursor + slots)[None] % 200
    backend.step(cache, 0, StepInput(ids, np.array([cursor]), np.array([[slots - 1]])), False)


def seconds_of_prompt(backend: Backend, length: int) -> float:
    cache = backend.new_cache(1)
    cache.reserve(length)
    begun = perf_counter()
    for cursor in range(0, length, PIECE):
        step(backend, cache, cursor, min(PIECE, length - cursor))
    return perf_counter() - begun


def seconds_of_steps(backend: Backend, cursor: int, slots: int) -> list[float]:
    cache = backend.new_cache(1)
    cache.reserve(cursor + slots)
    step(backend, cache, cursor, slots)
    found = []
    for _ in range(REPEATS):
        begun = perf_counter()
        step(backend, cache, cursor, slots)
        found.append(perf_counter() - begun)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE[@SET]")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", nargs="*", type=int, default=PROMPTS)
    args = parser.parse_args()
    backends = {name: opened(name, args.threads) for name in args.bundles}
    for length in args.prompts:
        times: dict[str, list[float]] = {name: [] for name in backends}
        for _ in range(args.rounds):
            for name, backend in backends.items():
                times[name].append(seconds_of_prompt(backend, length))
        for name, found in times.items():
            print(f"prompt {length}: {length / median(found):.0f} ({length / min(found):.0f}) {name}")
    for cursor in CURSORS:
        for slots in SLOTS:
            times = {name: [] for name in backends}
            for _ in range(args.rounds):
                for name, backend in backends.items():
                    times[name] += seconds_of_steps(backend, cursor, slots)
            for name, found in times.items():
                print(
                    f"{slots} after {cursor}: {1000 * median(found):.1f} ({1000 * min(found):.1f}) {name}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
