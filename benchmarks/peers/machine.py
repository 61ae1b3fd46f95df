"""Results of a benchmark, with the machine and the command that they are of."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def about(threads: int) -> dict[str, Any]:
    """The command, without the paths of this machine, and the machine."""
    words = [shlex.quote(Path(word).name if os.sep in word else word) for word in sys.argv[1:]]
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])
    return {"machine": describe(threads), "command": command}


def save(path: Path, value: dict[str, Any], places: Mapping[str, str] | None = None) -> None:
    """`places`: directories of this machine, by the word that stands for each in what is saved."""
    text = json.dumps(value, indent=1)
    for word, place in (places or {}).items():
        text = text.replace(place, word)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, path)


def describe(threads: int) -> dict[str, Any]:
    """Processor and load."""
    load = os.getloadavg()[0]
    return {"processor": _model(), "cores": os.cpu_count(), "threads": threads, "load_average": load}


def _model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor() or "unknown",
    )
