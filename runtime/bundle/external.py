"""The files that an ONNX graph takes its tensors from, whether it has inner graphs, and lists so long that
loading it would take all memory: read from the protobuf itself.

Knows no operator and needs no library.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

DATA = "external data"
# message -> its fields that lead to tensors, by number (onnx.proto)
FIELDS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: DATA},
}
KEY, VALUE = 1, 2
DIMS, TYPE, INT64 = 1, 2, 7
LONGEST_LIST = (
    65_536  # integers in a row: as a shape ONNX Runtime takes 1.5 KB for each when it loads a graph
)
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class Contents(NamedTuple):
    """`names`: the files of its external data. `is_nested`: it has loops, branches or functions, whose work
    its size does not tell.
    """

    names: set[str]
    is_nested: bool


def contents(file: int) -> Contents:
    """What an open ONNX file holds.

    Raises ValueError for what is none, and for a list of more integers than LONGEST_LIST.
    """
    size = os.fstat(file).st_size
    if not size:
        raise ValueError("an empty file is no ONNX graph")
    with mmap.mmap(file, size, access=mmap.ACCESS_READ) as data:
        return _contents(data, size)


def _contents(data: mmap.mmap, size: int) -> Contents:
    names, rest, is_nested = set(), [("model", 0, size)], False
    while rest:
        kind, at, end = rest.pop()
        entry: dict[int, bytes] = {}
        dims: list[int] = []
        dtype = 0
        while at < end:
            number, wire, start, at = _field(data, at, end)
            if kind == "tensor" and number == DIMS:
                dims += _integers(data, start, at)
            elif kind == "tensor" and number == TYPE and wire == VARINT:
                dtype, _ = _varint(data, start, at)
            elif kind == DATA and wire == BYTES:
                entry[number] = data[start:at]
            elif wire == BYTES and number in FIELDS.get(kind, ()):
                inner = FIELDS[kind][number]
                rest.append((inner, start, at))
                is_nested = is_nested or inner == "function" or (inner == "graph" and kind == "attribute")
        if entry.get(KEY) == b"location":
            names.add(entry.get(VALUE, b"").decode("utf-8", "replace"))
        if dtype == INT64 and len(dims) == 1 and dims[0] > LONGEST_LIST:
            raise ValueError(f"a list of {dims[0]} integers, {LONGEST_LIST} are the most")
    return Contents(names, is_nested)


def _integers(data: mmap.mmap, at: int, end: int) -> list[int]:
    """One number, or several that are packed."""
    values = []
    while at < end:
        value, at = _varint(data, at, end)
        values.append(value)
    return values


def _field(data: mmap.mmap, at: int, end: int) -> tuple[int, int, int, int]:
    """Number and wire type of the field at `at`, and where its value begins and ends."""
    tag, at = _varint(data, at, end)
    wire = tag & 7
    if wire == VARINT:
        start, (_, at) = at, _varint(data, at, end)
    elif wire == BYTES:
        length, start = _varint(data, at, end)
        at = start + length
    elif wire in (FIXED64, FIXED32):
        start, at = at, at + (8 if wire == FIXED64 else 4)
    else:
        raise ValueError("not an ONNX graph")
    if at > end:
        raise ValueError("not an ONNX graph")
    return tag >> 3, wire, start, at


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("not an ONNX graph")
