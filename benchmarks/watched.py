"""Runs a command and notes its time and the most anonymous memory it and its children held at once.

Linux only.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Watched:
    """`cpu_seconds` are of the command and its children: beside other work they say more than `seconds`.

    Sizes in bytes.
    """

    exit_code: int
    seconds: float
    cpu_seconds: float
    peak_anonymous: int
    samples: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def watch(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Watched:
    """Run `command` to its end, its output in `log`. Interrupted, it ends the command too."""
    before = os.times()
    with log.open("w", encoding="utf-8") as out:
        begun = perf_counter()
        child = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
        )
        peak = samples = 0
        try:
            while True:
                peak, samples = max(peak, sum(map(anonymous, family(child.pid)))), samples + 1
                try:
                    child.wait(POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:
            child.terminate()
            child.wait()
            raise
        seconds = perf_counter() - begun
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Watched(child.returncode, seconds, cpu, peak, samples)


def family(pid: int) -> Iterator[int]:
    """The process and all its descendants."""
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = path.read_text(encoding="ascii").split()
        except OSError:  # ended meanwhile
            continue
        for child in children:
            yield from family(int(child))


def anonymous(pid: int) -> int:
    """RssAnon in bytes; 0 for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)
