"""The process under attack: hostile bundles, one after the other, and one line of JSON on each.

A parent watches it die.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

from attack.mutators import mutate
from mars_export.runtime import GenerationConfig, MarsError, Session
from mars_export.runtime.machine import CACHE_VARIABLE, forget_peak, peak

ADDRESS_SPACE = 8 << 30  # so that what would take all memory ends in an error


def trial(good: Path, scratch: Path, seed: int) -> dict[str, object]:
    """Outcome of one hostile bundle: the error it ended with, or `ran`."""
    bundle = scratch / f"{seed}.bundle"
    shutil.copytree(good, bundle)
    try:
        kind = mutate(bundle, seed)
        forget_peak()
        before, start = peak(), time.process_time()
        outcome = _open_and_ask(bundle)
        seconds, taken = time.process_time() - start, peak() - before
        return {"seed": seed, "kind": kind, "outcome": outcome, "seconds": round(seconds, 3), "bytes": taken}
    finally:
        shutil.rmtree(bundle, ignore_errors=True)


def _open_and_ask(bundle: Path) -> str:
    config = GenerationConfig(tau=0.5, max_new_tokens=4, window=2, stop=("the",))
    try:
        session = Session.open(bundle, threads=1)
        session.generate("the man and the inner", config)
        session.generate([{"role": "user", "content": "hi"}], config)
    except MarsError as error:
        return type(error).__name__ if len(str(error)) < 100_000 else "a message of megabytes"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {str(error)[:200]!r}"
    return "ran"


def main() -> None:
    good, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    with tempfile.TemporaryDirectory(prefix="attack-") as scratch:
        os.environ[CACHE_VARIABLE] = str(Path(scratch, "cache"))  # not the user's
        for seed in range(first, last):
            print(json.dumps({"begin": seed}), flush=True)
            print(json.dumps(trial(good, Path(scratch), seed)), flush=True)


if __name__ == "__main__":
    main()
