"""Bundles that tests of several device modules open."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from support.agreement import MAIN
from support.tiny import Named

from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory, checkpoints: Named) -> Callable[[str, str], Path]:
    """Bundles by KV layout and precision."""
    root = tmp_path_factory.mktemp("layouts")

    @cache
    def exported(layout: str, precision: str) -> Path:
        options = ExportOptions(block=6, metrics=True, logits=True, kv_layout=layout, precision=precision)
        export_onnx(open_checkpoint(str(checkpoints(MAIN))), root / f"{layout}-{precision}", options)
        return root / f"{layout}-{precision}"

    return exported
