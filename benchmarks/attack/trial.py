"""The process under attack. It opens and runs hostile bundles one after the other, as users do, and prints
a line of JSON for each.

python -m attack.trial GOOD FIRST LAST

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
from pathlib import Path
from typing import IO, Any

from attack.mutators import mutate
from mars_export import GenerationConfig, MarsError, Session
from mars_export.runtime.machine import CACHE_VARIABLE, forget_peak, peak

ADDRESS_SPACE = 8 << 30  # so that what would take all memory ends in an error


def trial(good: Path, scratch: Path, seed: int, printed: Callable[[], str]) -> dict[str, Any]:
    """Outcome of one hostile bundle: the error it ended with, or `ran`."""
    place = scratch / str(seed)
    place.mkdir()
    try:
        shutil.copytree(good, place / "target")
        how = mutate(place / "target", seed)
        forget_peak()
        before, start = peak(), time.process_time()
        outcome = _outcome(place / "target")
        seconds, taken = time.process_time() - start, peak() - before
        if words := printed():
            outcome = f"printed: {words[:500]!r}"
        return {"seed": seed, "kind": how, "outcome": outcome, "seconds": round(seconds, 3), "bytes": taken}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _outcome(target: Path) -> str:
    config = GenerationConfig(tau=0.5, max_new_tokens=4, window=2, stop=("the",))
    try:
        session = Session.open(target, threads=1)
        session.generate("the man and the inner", config)
        session.generate([{"role": "user", "content": "hi"}], config)
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
    good, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    report = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryDirectory(prefix="attack-") as place:
        printed, scratch = Printed(out), Path(place)
        os.environ[CACHE_VARIABLE] = str(scratch / "cache")  # not the user's
        for seed in range(first, last):
            report.write(json.dumps({"begin": seed}) + "\n")
            report.write(json.dumps(trial(good, scratch, seed, printed)) + "\n")


if __name__ == "__main__":
    main()
