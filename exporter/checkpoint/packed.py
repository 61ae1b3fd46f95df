"""Checkpoints that others quantized: their codes as weights, or unchanged for a bundle of the same form.

Methods such as GPTQ, AWQ and AutoRound choose codes with a calibration text and much memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...runtime.errors import CheckpointError, ExportError
from ..codes import Codec, Encoded, Quantization
from .dims import Dims, expected_shapes
from .names import is_linear
from .tensors import Tensors, check_finite, first_of

KINDS = {4: "int4", 8: "int8"}
INSTEAD = (
    "export the original checkpoint, or quantize it with llm-compressor in the format pack-quantized"
    " (docs/quantization.md)"
)
DECODED_AT_ONCE = 1 << 21  # numbers of a weight, to keep temporaries small
Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Unsigned codes [outputs, inputs], scales [outputs, groups], and zero points alike (None: the middle)."""


@dataclass(frozen=True, slots=True)
class PackedTensors:
    """Tensors, some stored as codes and related parts, which are read as `X.weight`."""

    stored: Tensors
    codec: Codec
    packed: Mapping[str, tuple[int, int]]  # [outputs, inputs] by the name of the weight
    parts: tuple[str, ...]  # the last words of the names of codes and their related parts
    unpack: Callable[[str], Parts]  # the parts of a weight by its name
    ignored: frozenset[str] = frozenset()  # stored tensors that are not part of the model

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        plain = {
            name: shape
            for name, shape in self.stored.shapes.items()
            if name not in self.ignored and name.rpartition(".")[2] not in self.parts
        }
        return plain | dict(self.packed)

    def read(self, name: str) -> np.ndarray:
        """The tensor as stored, or decoded from codes, fp32 [outputs, inputs]."""
        if name not in self.packed:
            return self.stored.read(name)
        encoded, weight = self.encoded(name, np.dtype(np.float32)), np.empty(self.packed[name], np.float32)
        step = max(1, DECODED_AT_ONCE // weight.shape[1])
        for start in range(0, len(weight), step):
            rows = slice(start, start + step)
            weight[rows] = encoded.rows(rows).decoded().reshape(-1, weight.shape[1])
        return weight

    def holds(self, name: str, codec: Codec) -> bool:
        """Whether `name` is stored as codes of the form that `codec` makes."""
        return self.codec == codec and name in self.packed

    def encoded(self, name: str, scale_dtype: np.dtype) -> Encoded:
        """The codes of a packed weight.

        Raises CheckpointError for scales that are NaN or Inf, OverflowError beyond `scale_dtype`.
        """
        codes, scales, zeros = self.unpack(name)
        check_finite(f"{name}, its scales", scales)
        with np.errstate(over="ignore"):
            converted = np.ascontiguousarray(scales).astype(scale_dtype)
        if not np.isfinite(converted).all():
            raise OverflowError(name)
        if zeros is None:
            codes = (codes.astype(np.int16) - (self.codec.highest + 1)).astype(np.int8)
        outputs, inputs = self.packed[name]
        return Encoded(codes.reshape(outputs, self.codec.num_groups(inputs), -1), converted, zeros)


def fields(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The `count` unsigned fields of 4 or 8 bits in each row of int32 words, lowest first, as uint8."""
    octets = np.ascontiguousarray(words, "<i4").view(np.uint8).reshape(len(words), -1)
    if bits == 4:
        octets = np.stack([octets & 0xF, octets >> 4], -1).reshape(len(words), -1)
    return np.ascontiguousarray(octets[:, :count])


def misfits(stored: Tensors, expected: Mapping[str, tuple[int, ...]], need: str) -> Iterator[str]:
    """The error in the parts of a weight, if any; `need` names the weight's shape."""
    for part, shape in expected.items():
        present = stored.shapes.get(part)
        if present is None:
            yield f"{part}: missing"
        elif present != shape:
            yield f"{part} is {list(present)}, {need} need {list(shape)}"
        elif "scale" not in part and stored.read(part).dtype != np.int32:
            yield f"{part}: 32-bit integers are expected"


def require(problems: Sequence[str]) -> None:
    """Raise CheckpointError for parts that are missing or do not fit."""
    if problems:
        raise CheckpointError(
            f"{len(problems)} parts of the quantized checkpoint do not fit:\n  " + first_of(problems, "\n  ")
        )


def require_same_form(tensors: Tensors, dims: Dims, storage: Quantization | None) -> None:
    """Raise ExportError if a checkpoint's int4 or int8 codes would be rounded again to another form of the
    same width.

    Wider forms (fp32, int8 for int4 codes, w8a8) are allowed, because they lose next to nothing.
    """
    if not isinstance(tensors, PackedTensors) or storage is None or storage.scheme != tensors.codec.kind:
        return
    codec = tensors.codec
    problems: list[str] = []
    if codec != storage.linear:
        flags = f"--precision {codec.kind} --group {codec.group_size}"
        flags += "" if codec.symmetric else " --asymmetric"
        problems.append(
            f"the checkpoint's weights are {codec.dtype} codes in groups of {codec.group_size}"
            f" and would be rounded a second time: export with {flags}, or with a wider --precision"
        )
    plain = [name for name, _ in expected_shapes(dims) if is_linear(name) and name not in tensors.packed]
    if plain:
        problems.append(
            f"the checkpoint keeps {len(plain)} Linear weights unquantized, and an {codec.kind} bundle would"
            f" round them: {first_of(plain)}"
        )
    if problems:
        raise ExportError("; ".join(problems))
