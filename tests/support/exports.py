"""Bundles of checkpoints, exported in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions
from mars_export.runtime.bundle.manifest import Manifest


def export(checkpoint: Path, target: Path, options: ExportOptions | None = None, **fields: Any) -> Manifest:
    """Write a bundle with these options, or with `fields` of ExportOptions."""
    return export_onnx(open_checkpoint(str(checkpoint)), target, options or ExportOptions(**fields))
