"""A calibration on a tiny bundle of the test's own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.calibrations import OPTIONS, rows
from support.tiny import Named

from mars_export.calibration.tau.run import CalibrationRequest


@pytest.fixture
def bundle(bundles: Named, tmp_path: Path) -> Path:
    return shutil.copytree(bundles("qwen2"), tmp_path / "mine.bundle")


@pytest.fixture
def request_for(bundle: Path, tmp_path: Path) -> Callable[..., CalibrationRequest]:
    (tmp_path / "words.jsonl").write_text(rows())
    wanted = CalibrationRequest(
        bundle, str(tmp_path / "words.jsonl"), output=tmp_path / "out", threads=1, options=OPTIONS
    )
    return lambda **changes: replace(wanted, **changes)
