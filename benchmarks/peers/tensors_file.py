"""Writes a safetensors file tensor by tensor, so that memory stays at one tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def write(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype, make: Callable[[str], np.ndarray]
) -> None:
    """Write one tensor for each name of `shapes`, all of `dtype`; `make(name)` gives its numbers when its
    turn comes.
    """
    entries, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype.name], "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, shape in shapes.items():
            tensor = np.ascontiguousarray(make(name), dtype)
            assert tensor.shape == shape, f"{name}: {tensor.shape} is not {shape}"
            file.write(tensor.view(np.uint8).data)
