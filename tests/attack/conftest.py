"""A bundle to attack."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.tiny import Named


@pytest.fixture
def path(bundles: Named, tmp_path: Path) -> Path:
    return shutil.copytree(bundles("llama"), tmp_path / "foreign.bundle")
