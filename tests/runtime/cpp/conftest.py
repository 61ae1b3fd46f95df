"""What the tests of libmars share: the library, built once, and a bundle of their own to change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.cabi import Library, build
from support.fixtures import Named


@pytest.fixture(scope="session")
def library() -> Library:
    return Library(build() / "libmars.so")


@pytest.fixture
def path(bundles: Named, tmp_path: Path) -> Path:
    return shutil.copytree(bundles("llama"), tmp_path / "mars.bundle")
