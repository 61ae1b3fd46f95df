"""Fixtures of the exporter's tests: checkpoints to damage, and bundles to build engines in."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from support.engines import graph_options
from support.exports import export
from support.fixtures import Named


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory, checkpoints: Named) -> Callable[[str, str, str], Path]:
    """Bundles with graphs only, by family, precision and KV layout. Read only."""
    root = tmp_path_factory.mktemp("graphs")

    @cache
    def exported(family: str, precision: str, layout: str) -> Path:
        target = root / f"{family}-{precision}-{layout}"
        export(checkpoints(family), target, replace(graph_options(precision), kv_layout=layout))
        return target

    return exported


@pytest.fixture
def copied(checkpoints: Named, tmp_path: Path) -> Named:
    """A checkpoint that a test may damage."""
    return lambda name: shutil.copytree(checkpoints(name), tmp_path / name)


@pytest.fixture
def small(graphs: Callable[[str, str, str], Path], tmp_path: Path) -> Path:
    """A bundle of its own for each test, without an engine."""
    shutil.copytree(graphs("llama", "fp16", "in-place"), tmp_path / "b")
    return tmp_path / "b"
