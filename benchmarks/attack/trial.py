"""The process under attack. It opens hostile bundles or checkpoints one after the other and prints a line of
JSON for each.

python -m attack.trial bundles|checkpoints GOOD FIRST LAST

A parent process notices a crash. Output to standard output also counts as a failure, because it would break
programs that print JSON there.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Protocol, cast

from mars_export import MarsError
from mars_export.runtime.machine import CACHE_VARIABLE, forget_peak, peak

ADDRESS_SPACE = 8 << 30  # so that what would take all memory ends in an error
KINDS = {"bundles": "attack.bundles", "checkpoints": "attack.checkpoints"}


class Kind(Protocol):
    """What is attacked; a module of KINDS."""

    def prepare(self, good: Path, place: Path) -> None:
        """Copy `good` to `place`, or make what is good there."""

    def mutate(self, good: Path, target: Path, seed: int) -> str:
        """Make a hostile `target` of what `prepare` made; returns how."""

    def attempt(self, target: Path, seed: int, /) -> None:
        """What people do with one. Raises MarsError, or anything, when something is wrong."""


def kind_of(name: str) -> Kind:
    return cast(Kind, import_module(KINDS[name]))


def trial(kind: Kind, good: Path, scratch: Path, seed: int, printed: Callable[[], str]) -> dict[str, Any]:
    """Outcome of one hostile thing: the error it ended with, or `ran`."""
    place = scratch / str(seed)
    place.mkdir()
    try:
        how = kind.mutate(good, place / "target", seed)
        forget_peak()
        before, start = peak(), time.process_time()
        outcome = _outcome(kind, place / "target", seed)
        seconds, taken = time.process_time() - start, peak() - before
        if words := printed():
            outcome = f"printed: {words[:500]!r}"
        return {"seed": seed, "kind": how, "outcome": outcome, "seconds": round(seconds, 3), "bytes": taken}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _outcome(kind: Kind, target: Path, seed: int) -> str:
    try:
        kind.attempt(target, seed)
    except MarsError as error:
        return type(error).__name__ if len(str(error)) < 100_000 else "a message of megabytes"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {str(error)[:200]!r}"
    return "ran"


class Printed:
    """An empty file in place of the standard output."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        os.dup2(file.fileno(), sys.stdout.fileno())

    def __call__(self) -> str:
        """What was written since the last call."""
        sys.stdout.flush()
        words = os.pread(self.file.fileno(), 10_000, 0)
        os.ftruncate(self.file.fileno(), 0)
        os.lseek(self.file.fileno(), 0, os.SEEK_SET)
        return words.decode(errors="replace")


def main() -> None:
    kind, good, first, last = kind_of(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    report = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryDirectory(prefix="attack-") as place:
        printed, scratch = Printed(out), Path(place)
        os.environ[CACHE_VARIABLE] = str(scratch / "cache")  # not the user's
        kind.prepare(good, scratch / "good")
        for seed in range(first, last):
            report.write(json.dumps({"begin": seed}) + "\n")
            report.write(json.dumps(trial(kind, scratch / "good", scratch, seed, printed)) + "\n")


if __name__ == "__main__":
    main()
