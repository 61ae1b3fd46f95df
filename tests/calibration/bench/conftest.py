"""What the tests of benchmarks share: a request for a small one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.calibrations import WORDS, rows
from support.tiny import Named

from mars_export.calibration.bench import BenchRequest
from mars_export.calibration.options import BenchOptions


@pytest.fixture
def request_for(bundles: Named, tmp_path: Path) -> Callable[..., BenchRequest]:
    """Makes a request for a small benchmark, with changes."""
    (tmp_path / "words.jsonl").write_text(rows(WORDS[:6], max_new_tokens=6))
    options = BenchOptions(taus=(0.5,), batches=(1, 2), rounds=2)
    wanted = BenchRequest(bundles("qwen2"), str(tmp_path / "words.jsonl"), threads=1, options=options)
    return lambda **changes: replace(wanted, **changes)
