"""What the tests of benchmarks share: a request for a small one, and no picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.bench import OPTIONS, rows
from support.tiny import Named

from mars_export.calibration.bench.bench import BenchRequest


@pytest.fixture(autouse=True)
def _no_picture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes seconds: only the picture's own test does it."""
    if "picture" not in request.node.name:
        monkeypatch.setattr(
            "mars_export.calibration.bench.figure.save_png", lambda report, path: path.write_bytes(b"")
        )


@pytest.fixture
def request_for(bundles: Named, tmp_path: Path) -> Callable[..., BenchRequest]:
    """Makes a request for a small benchmark, with changes."""
    (tmp_path / "words.jsonl").write_text(rows())
    wanted = BenchRequest(
        bundles("qwen2"), str(tmp_path / "words.jsonl"), tmp_path / "out", threads=1, options=OPTIONS
    )
    return lambda **changes: replace(wanted, **changes)
