"""What the tests of benchmarks share: a request for a small one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.bench import OPTIONS, rows
from support.tiny import Named

from mars_export.calibration.bench.bench import BenchRequest


@pytest.fixture
def request_for(bundles: Named, tmp_path: Path) -> Callable[..., BenchRequest]:
    """Makes a request for a small benchmark, with changes."""
    (tmp_path / "words.jsonl").write_text(rows())
    wanted = BenchRequest(bundles("qwen2"), str(tmp_path / "words.jsonl"), threads=1, options=OPTIONS)
    return lambda **changes: replace(wanted, **changes)
