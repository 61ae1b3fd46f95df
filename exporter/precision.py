"""`--precision auto`: what suits this machine's processor, or a GPU, and why. Measures nothing."""

from __future__ import annotations

import platform
from pathlib import Path

from ..runtime.errors import ExportError
from ..runtime.machine import CPUINFO, cpu_flags

# Instructions that multiply unsigned by signed bytes and add up in 32 bits: without them w8a8 has no fast
# kernel.
BYTE_PRODUCTS = ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")

# Smaller than what is chosen here, and good only with codes that a text has chosen.
SMALLEST = "; smaller still: --precision int4, with its codes chosen on a text (--calibration-text)"


def choose_precision(device: str = "cpu", cpuinfo: Path = CPUINFO) -> tuple[str, str]:
    """A precision for ONNX Runtime on this CPU, or on a GPU, and the reason in one sentence."""
    if device == "cuda":
        return (
            "fp16",
            "a GPU multiplies half precision fastest, and its memory is half as busy;"
            " smaller: --precision int4, and for TensorRT `mars-export trt`",
        )
    if device != "cpu":
        raise ExportError(f"unknown device `{device}` (known: cpu, cuda)")
    words = cpu_flags(cpuinfo)
    if not words:
        return (
            "int8",
            f"the instructions of this {platform.machine() or 'unknown'} processor are not known;"
            f" int8 weights run everywhere{SMALLEST}",
        )
    found = [name for name in BYTE_PRODUCTS if name in words]
    if found:
        return (
            "w8a8",
            f"this processor multiplies bytes ({found[0]}),"
            f" so wide windows are cheapest with 8-bit activations{SMALLEST}",
        )
    return (
        "int8",
        "this processor has no byte products (VNNI, dot product), so only the weights are made small"
        + SMALLEST,
    )
