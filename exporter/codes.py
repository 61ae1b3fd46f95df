"""Integer codes for weights: 4 or 8 bits, with a scale for each group or channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

SCHEMES = ("int4", "int8", "w8a8")
GROUP_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Codec:
    """How the numbers of one weight become codes.

    `group_size` inputs share a scale; None means all inputs of a channel. Symmetric codes are signed and have
    no zero point.
    """

    kind: str  # "int4" or "int8"
    group_size: int | None
    symmetric: bool = True

    @property
    def bits(self) -> int:
        return int(self.kind.removeprefix("int"))

    @property
    def dtype(self) -> str:
        return self.kind if self.symmetric else f"u{self.kind}"

    @property
    def lowest(self) -> int:
        if not self.symmetric:
            return 0
        return -8 if self.kind == "int4" else -self.highest

    @property
    def highest(self) -> int:
        return (1 << (self.bits - self.symmetric)) - 1

    def num_groups(self, inputs: int) -> int:
        return inputs // (self.group_size or inputs)

    def encode(self, weight: np.ndarray, scale_dtype: np.dtype[Any]) -> Encoded:
        """Encode a Linear weight [outputs, inputs], with scales that are rounded to `scale_dtype`."""
        outputs, inputs = weight.shape
        groups = np.asarray(weight, np.float32).reshape(outputs, self.num_groups(inputs), -1)
        if self.symmetric:
            high = np.abs(groups).max(-1)
            low, steps = -high, 2 * self.highest
        else:
            low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
            steps = self.highest
        with np.errstate(over="ignore"):
            scales = ((high - low) / np.float32(steps)).astype(scale_dtype)
        # The codes of a group are zero if its numbers are zero or too small for the scale's dtype.
        wide = np.where(scales > 0, scales, 1).astype(np.float32)
        zeros, shifted = None, np.rint(groups / wide[..., None])
        if not self.symmetric:
            zeros = np.clip(np.rint(-low / wide), self.lowest, self.highest).astype(np.uint8)
            shifted += zeros[..., None]
        codes = np.clip(shifted, self.lowest, self.highest).astype(np.int8 if self.symmetric else np.uint8)
        if (scales <= 0).any():
            codes[scales <= 0] = 0 if zeros is None else zeros[scales <= 0][..., None]
        return Encoded(codes, scales, zeros)


@dataclass(frozen=True, slots=True)
class Encoded:
    """codes [outputs, groups, group] int8 or uint8; scales, zeros (uint8, or None) [outputs, groups]."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None

    def rows(self, rows: slice) -> Encoded:
        """The codes of some outputs."""
        return Encoded(self.codes[rows], self.scales[rows], None if self.zeros is None else self.zeros[rows])

    def decoded(self) -> np.ndarray:
        """The decoded weight, [outputs, groups, group] fp32."""
        plain = self.codes.astype(np.float32)
        if self.zeros is not None:
            plain -= self.zeros[..., None]
        return plain * self.scales[..., None].astype(np.float32)


@runtime_checkable
class CodeSource(Protocol):
    """Tensors, some already codes that are stored unchanged."""

    def holds(self, name: str, codec: Codec) -> bool:
        """Whether weight `name` is stored as codes of the form that `codec` makes."""
        ...

    def encoded(self, name: str, scale_dtype: np.dtype[Any]) -> Encoded: ...


def pack(codes: np.ndarray, dtype: str) -> bytes:
    """The bytes of an ONNX tensor of `codes`. Two 4-bit codes share a byte, the first in the low half."""
    if not dtype.endswith("int4"):
        return codes.tobytes()
    flat = codes.reshape(-1).view(np.uint8) & 0xF
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    return (flat[0::2] | (flat[1::2] << 4)).tobytes()


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a bundle's weights are stored.

    `scheme`: "int4" and "int8" quantize weights only, in groups of `group_size` inputs. "w8a8" has one scale
    for each output channel and also quantizes activations to 8 bits at run time, each token separately.
    `head` and `embedding`: how lm_head and the embedding table are stored ("float" is the graph's precision).
    Tied tables in the same form are stored once.
    """

    scheme: str
    group_size: int = 32
    symmetric: bool = True
    head: str = "int8"
    embedding: str = "int8"

    def problems(self, inputs: Mapping[str, int]) -> list[str]:
        """The errors in these choices; `inputs` are the numbers of inputs of Linear maps, by name."""
        problems = []
        if self.scheme == "w8a8":
            if not self.symmetric:
                problems.append("--asymmetric is for int4 and int8: the channels of w8a8 have no zero point")
            if self.head == "int4":
                problems.append("--head int4 is for --precision int4 and int8")
        elif self.group_size not in GROUP_SIZES:
            problems.append(
                f"--group must be one of {', '.join(map(str, GROUP_SIZES))}, not {self.group_size}"
            )
        else:
            for name, count in inputs.items():
                if count % self.group_size:
                    problems.append(f"--group {self.group_size} does not divide the {count} inputs of {name}")
        return problems

    @property
    def is_integer(self) -> bool:
        """Whether activations are quantized too, so that products are computed in integers."""
        return self.scheme == "w8a8"

    @property
    def linear(self) -> Codec:
        if self.is_integer:
            return Codec("int8", None)
        return Codec(self.scheme, self.group_size, self.symmetric)

    def table(self, kind: str) -> Codec | None:
        """The codec of a vocabulary table. int8 tables have a scale for each row, which can be read alone."""
        if kind == "float":
            return None
        if kind == "int4":
            return Codec("int4", self.group_size, self.symmetric)
        return Codec("int8", None)
