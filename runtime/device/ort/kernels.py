"""Exact products of bytes on a CPU, for w8a8 and w4a8 graphs: by mars-export-kernels, or by ONNX Runtime.

Without VNNI, ONNX Runtime adds two products of bytes in 16 bits, with saturation, unless the weights are made
unsigned by a session option, for which it has other code. This is tested once in a process.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ... import machine
from ...bundle.manifest import Variant
from ...errors import MarsWarning, SessionError

# "0" turns the package off; the name of an instruction set, such as "avx2", asks for that one.
VARIABLE = "MARS_EXPORT_KERNELS"
OFF = "0"
RECORD = "mars_export_kernels-*.dist-info/RECORD"  # of the installed files, beside the package


@dataclass(frozen=True, slots=True)
class Kernels:
    """An installed package: its library, and the instruction set that it uses on this processor."""

    version: str
    instructions: str
    library: Path


WITHOUT = "mars-export-kernels is {}, so {}; to do without it, export with {}"
SLOW_KV = "its int8 KV entries are slow, and prompts are read several times slower", "--kv float"
SLOW_WEIGHTS = "its 4-bit weights take the memory and the time of 16 bits", "--precision w8a8"


def used(variant: Variant, graph: Path) -> Kernels | None:
    """The package for a variant on the CPU: of w8a8 or w4a8, if `installed`. Warns if `graph` needs it."""
    package = installed() if variant.is_integer else None
    slow = {"w4a8": SLOW_WEIGHTS}.get(variant.precision, SLOW_KV if variant.kv_dtype == "int8" else ())
    if slow and package is None:
        warnings.warn(f"{graph}: {WITHOUT.format(absence(), *slow)}", MarsWarning, stacklevel=3)
    return package


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
            f" it, or set it to {OFF} to disable the package"
        )
    # The portable code is slower than ONNX Runtime's own products; it is for tests.
    if name == package.PORTABLE and name != wanted:
        return None
    return Kernels(package.__version__, name, package.LIBRARY)


def absence() -> str:
    """Why `installed` is None, as words after "is"."""
    if os.environ.get(VARIABLE) == OFF:
        return f"turned off by {VARIABLE}={OFF}"
    try:
        import mars_export_kernels as package
    except ModuleNotFoundError:
        return "not installed (pip install mars-export-kernels, in a clone ./kernels)"
    if not package.LIBRARY.exists():
        return "built without a compiler (install its wheel)"
    return "without code for this processor"


def _require_whole(library: Path) -> None:
    """Raise OSError for a library that differs from the installed one: a truncated one would kill the process
    as soon as it is loaded. Packages installed without a record of their files are not checked.
    """
    for record in library.parent.parent.glob(RECORD):
        for line in record.read_text().splitlines():
            path, expected, size = line.rsplit(",", 2)
            if path != f"{library.parent.name}/{library.name}" or not expected:
                continue
            data, (mode, value) = library.read_bytes(), expected.split("=")
            if urlsafe_b64encode(hashlib.new(mode, data).digest()).rstrip(b"=").decode() != value:
                raise OSError(f"{library} is damaged: {len(data)} of {size} bytes, and another hash")


INPUTS, OUTPUTS, LARGEST = 64, 48, 127
ROWS = (1, 2, 8)  # kernels differ by the number of rows
# An ONNX model of one node, MatMulInteger of x [rows, 64] uint8 and w [64, 48] int8, up to the bytes of w.
GRAPH = (
    b'\x08\x08B\x04\n\x00\x10\r:\xce\x18\n\x18\n\x01x\n\x01w\x12\x01y"\rMatMulInteger\x12\x01pZ\x0f\n\x01x\x12\n\n'
    b"\x08\x08\x02\x12\x04\n\x00\n\x00b\x0f\n\x01y\x12\n\n\x08\x08\x06\x12\x04\n\x00\n\x00*\x8c\x18\x08@\x080\x10"
    b"\x03B\x01wJ\x80\x18"
)
WEIGHTS = np.tile(np.array([LARGEST, -LARGEST], np.int8), (INPUTS, OUTPUTS // 2))


UNSIGNED = {"session.x64quantprecision": "1"}  # for weights of 8 bits; with VNNI it only costs time
OLDEST = (1, 30)  # with this entry; 1.25, 1.26 and 1.28 abort, 1.27 and 1.29 were not tested


def exact_entries(ort: Any, settings: Mapping[str, str]) -> dict[str, str]:
    """Configuration entries with which sessions with the entries `settings` multiply bytes exactly. Raises
    SessionError if there are none.
    """
    own = dict(settings)
    if not _inexact(ort, tuple(own.items())):
        return {}
    if tuple(map(int, ort.__version__.split(".")[:2])) < OLDEST:
        raise SessionError(
            f"ONNX Runtime {ort.__version__} computes wrong products of bytes on this processor, so a w8a8"
            " or w4a8 bundle would give wrong text; install onnxruntime 1.30 or newer, or mars-export-kernels"
        )
    if rows := _inexact(ort, tuple((own | UNSIGNED).items())):
        raise SessionError(
            f"ONNX Runtime {ort.__version__} computes wrong products of bytes on this processor"
            f" ({machine.processor()}, byte products: {machine.byte_products()}), in steps of"
            f" {', '.join(map(str, rows))} slots, so a w8a8 or w4a8 bundle would give wrong text; install"
            " another version of onnxruntime, or make the bundle with --precision int8"
        )
    return UNSIGNED


@cache
def _inexact(ort: Any, settings: tuple[tuple[str, str], ...]) -> list[int]:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    for entry in settings:
        options.add_session_config_entry(*entry)
    session = ort.InferenceSession(GRAPH + WEIGHTS.tobytes(), options, providers=["CPUExecutionProvider"])
    return inexact(lambda x: session.run(None, {"x": x})[0])


def inexact(product: Callable[[np.ndarray], np.ndarray]) -> list[int]:
    """Numbers of rows for which `product`, of the largest x [rows, INPUTS] uint8 and WEIGHTS, is wrong."""
    rows = [np.full((count, INPUTS), 255, np.uint8) for count in ROWS]
    return [len(x) for x in rows if (product(x) != x.astype(np.int32) @ WEIGHTS.astype(np.int32)).any()]
