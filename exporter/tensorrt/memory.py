"""Host memory that an engine build will take, held against what there is."""

from __future__ import annotations

from ...runtime.errors import ExportError
from ...runtime.machine import available

# Measured with TensorRT-RTX 1.7 on models of 135M to 1.5B parameters: about 3.1 times the weights above the process itself.
FACTOR, BASE = 3.1, 500_000_000


def estimate(weight_bytes: int) -> int:
    """Bytes that building an engine from so many bytes of weights is expected to take."""
    return int(FACTOR * weight_bytes) + BASE


def require(weight_bytes: int, force: bool) -> None:
    """Raise ExportError when the build is not expected to fit and `force` is not given."""
    needed, there = estimate(weight_bytes), available()
    if there is not None and needed > there and not force:
        raise ExportError(
            f"building an engine from {weight_bytes / 1e9:.2f} GB of weights takes about {needed / 1e9:.1f} GB of memory and {there / 1e9:.1f} GB are"
            " available; close other programs, use a narrower --precision or a larger machine, or try all the same with --force"
        )
