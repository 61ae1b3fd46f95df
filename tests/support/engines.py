"""The quickest TensorRT engines to build, and the graphs that they are built of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mars_export.exporter.export_options import EngineOptions, ExportOptions

BLOCK, CAPACITY = 6, 128
SMALL = EngineOptions(target="sm86", fixed=True, capacity=CAPACITY)  # the quickest to build
QUANTIZED = {"activations": "fp16", "group": 16, "embedding": "float", "head": "float"}


def graph_options(precision: str, **changes: Any) -> ExportOptions:
    # Drift is judged elsewhere: four bits are too few for random weights of 48 inputs.
    settings: dict[str, Any] = {**QUANTIZED, "logits": False, **changes}
    return ExportOptions(block=BLOCK, precision=precision, allow_drift=True, **settings)


def contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir()}
