"""The optional package mars-export-kernels: operators for w8a8 graphs on a CPU."""

from __future__ import annotations

import hashlib
import os
from base64 import urlsafe_b64encode
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from ...errors import SessionError

# "0" turns the package off; the name of an instruction set, such as "avx2", asks for that one.
VARIABLE = "MARS_EXPORT_KERNELS"
OFF = "0"
PRECISION = "w8a8"
DISTRIBUTION = "mars-export-kernels"


@dataclass(frozen=True, slots=True)
class Kernels:
    """An installed package: its library, and the instruction set that it uses on this processor."""

    version: str
    instructions: str
    library: Path


def used(precision: str, device: str) -> Kernels | None:
    """The package for a variant of `precision` on a device: w8a8 on "cpu", if `installed`."""
    return installed() if precision == PRECISION and device == "cpu" else None


def installed() -> Kernels | None:
    """The package if sessions use it: it is installed, not turned off, and has code for this processor.

    Raises SessionError if it is installed and broken, or if the processor lacks what the variable asks for.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted == OFF:
        return None
    try:
        import mars_export_kernels as package

        if not package.LIBRARY.exists():  # built without a compiler
            return None
        _require_whole(package.LIBRARY)
        name = package.instructions()
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "mars_export_kernels":
            return None
        raise SessionError(
            f"mars-export-kernels is installed, but does not load ({type(error).__name__}: {error}); install"
            f" it again (docs/quantization.md), or set {VARIABLE}={OFF}"
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


def _require_whole(library: Path) -> None:
    """Raise OSError for a library that differs from the installed one: a truncated one would kill the process
    as soon as it is loaded. Packages installed without a record of their files are not checked.
    """
    library = library.resolve()
    try:
        listed = files(DISTRIBUTION) or ()
    except PackageNotFoundError:
        return
    recorded = next((f for f in listed if Path(str(f.locate())).resolve() == library), None)
    if recorded is None or recorded.hash is None:
        return
    data = library.read_bytes()
    digest = urlsafe_b64encode(hashlib.new(recorded.hash.mode, data).digest()).rstrip(b"=").decode()
    if digest != recorded.hash.value:
        raise OSError(f"{library} is damaged: {len(data)} of {recorded.size} bytes, and another hash")
