"""When requests come: by Poisson's law, or as a file has it. Knows not what they ask."""

from __future__ import annotations

import math
import random
from pathlib import Path

from ...runtime.errors import CalibrationError

MOST = 1_000_000


def poisson(per_second: float, count: int, seed: int) -> list[float]:
    """Seconds of `count` arrivals, the first after a wait like all others."""
    draw, at, times = random.Random(seed), 0.0, []
    for _ in range(count):
        at += draw.expovariate(per_second)
        times.append(at)
    return times


def order(num_works: int, count: int, seed: int) -> list[int]:
    """Which work each request is: all of it in a seeded order, then again in another one."""
    draw, numbers = random.Random(seed), list(range(num_works))
    drawn: list[int] = []
    while len(drawn) < count:
        draw.shuffle(numbers)
        drawn += numbers
    return drawn[:count]


def read(path: Path) -> list[float]:
    """A trace: seconds, one number a line, in any order; # begins a comment. The first arrival is at 0.

    Raises CalibrationError that lists every bad line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path}: cannot be read: {error}; give a file of seconds") from error
    times: list[float] = []
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        try:
            at = float(word)
        except ValueError:
            at = math.nan
        if math.isfinite(at):
            times.append(at)
        else:
            problems.append(f"line {number}: {word[:40]!r} is no number of seconds")
    if problems:
        raise CalibrationError(f"{path}:\n  " + "\n  ".join(problems[:20]))
    if not 2 <= len(times) <= MOST:
        raise CalibrationError(f"{path}: {len(times)} arrivals; a trace has 2 to {MOST}")
    times.sort()
    return [at - times[0] for at in times]
