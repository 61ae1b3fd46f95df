"""Fixtures of the exporter's tests: checkpoints to damage, and bundles to build engines in."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.engines import graph_options
from support.fixtures import Exported, Named


@pytest.fixture(scope="session")
def graphs(exported: Exported) -> Callable[[str, str, str], Path]:
    """Bundles with graphs only, by family, precision and KV layout. Read only."""
    return lambda family, precision, layout: exported(family, graph_options(precision, kv_layout=layout))


@pytest.fixture
def copied(checkpoints: Named, tmp_path: Path) -> Named:
    """A checkpoint that a test may damage."""
    return lambda name: shutil.copytree(checkpoints(name), tmp_path / name)


@pytest.fixture
def small(graphs: Callable[[str, str, str], Path], tmp_path: Path) -> Path:
    """A bundle of its own for each test, without an engine."""
    shutil.copytree(graphs("llama", "fp16", "in-place"), tmp_path / "b")
    return tmp_path / "b"
