"""The optional package mars-export-kernels: an operator for the products of w8a8 graphs on a CPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ...errors import SessionError

# "0" turns the package off; the name of an instruction set, such as "avx2", asks for that one.
VARIABLE = "MARS_EXPORT_KERNELS"
OFF = "0"
PRECISION = "w8a8"


@dataclass(frozen=True, slots=True)
class Kernels:
    """An installed package: its library, and the instruction set that it uses on this processor."""

    version: str
    instructions: str
    library: Path


def installed() -> Kernels | None:
    """The package if sessions use it: it is installed, not turned off, and has code for this processor.

    Raises SessionError if its library does not load, or if the processor lacks what the variable asks for.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted == OFF:
        return None
    try:
        import mars_export_kernels as package
    except ImportError:
        return None
    if not package.LIBRARY.exists():  # built without a compiler
        return None
    try:
        name = package.instructions()
    except OSError as error:
        raise SessionError(
            f"mars-export-kernels is installed, but its library does not load ({error}); install it again"
            f" (docs/quantization.md), or set {VARIABLE}={OFF}"
        ) from error
    if wanted and name != wanted:
        raise SessionError(
            f"{VARIABLE}={wanted} is not an instruction set of this processor, whose fastest is {name}; unset"
            f" it, or set it to {OFF} to do without the package"
        )
    # The portable code is slower than ONNX Runtime's own products; it is for tests.
    if name == package.PORTABLE and name != wanted:
        return None
    return Kernels(package.__version__, name, package.LIBRARY)
