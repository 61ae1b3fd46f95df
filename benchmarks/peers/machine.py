"""What this machine can do at most: memory read per second and products per second, so that a limit is
measured and not guessed.
"""

from __future__ import annotations

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

READ_FLOATS = 1 << 26  # 256 MB for each thread: far more than a cache holds
SIDE = 1536


def describe(threads: int) -> dict[str, Any]:
    """Processor, load, and the best of several tries of reading memory and of multiplying fp32 matrices with
    `threads` threads.
    """
    return {
        "processor": _model(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_average": os.getloadavg()[0],
        "memory_read_gb_per_second": _read(threads),
        "fp32_gflops": _multiply(threads),
    }


def _best(threads: int, work: Any, arguments: list[Any], tries: int) -> float:
    """Seconds of the fastest try; each thread gets one argument."""
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(tries):
            begun = perf_counter()
            list(pool.map(work, arguments))
            times.append(perf_counter() - begun)
    return min(times)


def _read(threads: int) -> float:
    arrays = [np.ones(READ_FLOATS, np.float32) for _ in range(threads)]
    return threads * READ_FLOATS * 4 / _best(threads, np.max, arrays, 8) / 1e9


def _multiply(threads: int) -> float:
    pairs = [np.ones((SIDE, SIDE), np.float32) for _ in range(threads)]
    # numpy's BLAS has threads of its own: as many products at once as threads were asked for keep them all
    # busy.
    return threads * 2 * SIDE**3 / _best(threads, lambda a: a @ a, pairs, 8) / 1e9


def _model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor() or "unknown",
    )
