"""Checkpoints made to hurt: what their JSON is spoilt with, and that they are refused soon, in little memory
and in few words.

`MARS_ATTACKS` is the number of mutated checkpoints of each kind; a few seconds' worth by default.
"""

from __future__ import annotations

import os
import signal
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.runtime.errors import CheckpointError

ATTACKS = int(os.environ.get("MARS_ATTACKS", "150"))
SECONDS, BYTES = 5, 300_000_000  # of processor time: the machine may be busy
SCALARS = (None, 0, -1, 1, 2**31, 2**63, 10**400, 0.5, "", "x", "é\ud800", True, [], {}, [[]], {"a": {}})


@contextmanager
def bounded() -> Iterator[None]:
    """What is inside ends soon and allocates little (numpy and Python objects are counted)."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    before, start = signal.signal(signal.SIGPROF, ring), time.process_time()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < BYTES
        assert time.process_time() - start < SECONDS, "a reader may report the alarm as its own error"
    finally:
        tracemalloc.stop()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def refused(location: Path, message: str, **arguments: Any) -> None:
    with bounded(), pytest.raises(CheckpointError, match=message) as told:
        open_checkpoint(str(location), **arguments)
    assert len(str(told.value)) < 20_000
