"""`--precision auto`: what suits a CPU, or a GPU, and why. Measures nothing."""

from __future__ import annotations

from ..runtime.errors import ExportError
from ..runtime.machine import byte_products

SMALLER = "for a smaller bundle: --precision int4 --calibration-text FILE"


def choose_precision(device: str = "cpu") -> tuple[str, str]:
    """A precision for ONNX Runtime on a CPU or a GPU, and the reason."""
    if device == "cuda":
        return "fp16", f"the fastest on a GPU; {SMALLER}"
    if device != "cpu":
        raise ExportError(f"unknown device `{device}` (known: cpu, cuda)")
    return "w8a8", f"the fastest on a CPU, byte products here: {byte_products()}; {SMALLER}"
