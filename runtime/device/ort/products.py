"""Exact byte products by ONNX Runtime, tested once in a process.

w8a8 bundles depend on it: without VNNI, ONNX Runtime adds two products of bytes in 16 bits, with saturation,
unless it is told to make the weights unsigned, for which it has other code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from ... import machine
from ...errors import SessionError

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


def exact_entries(ort: Any, settings: Mapping[str, str]) -> dict[str, str]:
    """Configuration entries with which sessions with the entries `settings` multiply bytes exactly. Raises
    SessionError if there are none.
    """
    own = dict(settings)
    if not _inexact(ort, tuple(own.items())):
        return {}
    if rows := _inexact(ort, tuple((own | UNSIGNED).items())):
        raise SessionError(
            f"ONNX Runtime {ort.__version__} computes wrong products of bytes on this processor"
            f" ({machine.processor()}, byte products: {machine.byte_products()}), in steps of"
            f" {', '.join(map(str, rows))} slots, so a w8a8 bundle would give wrong text; install another"
            " version of onnxruntime, or make the bundle with --precision int8"
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
