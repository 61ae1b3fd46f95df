"""Integer codes for weights: 4 or 8 bits, with a scale for each group or channel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

INTEGER = ("w8a8", "w4a8")  # activations are quantized too, so that products are computed in integers
SCHEMES = ("int4", "int8", *INTEGER)
GROUP_SIZES = (16, 32, 64, 128, 256)
MULTIPLIED_GROUP = 32
BLOCK = 64  # inputs, of which weights in panels have a whole number
SENSITIVE = ("v", "down")  # maps that lose most by 4 bits


@dataclass(frozen=True, slots=True)
class Codec:
    """How the numbers of one weight become codes.

    `group_size` inputs share a scale; None means all inputs of a channel. Symmetric codes are signed and have
    no zero point. `multiplied`: a group's scale is an integer times the channel's, so that products with
    integers have integer sums.
    """

    kind: str  # "int4" or "int8"
    group_size: int | None
    symmetric: bool = True
    multiplied: bool = False

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

    def max_multiplier(self, inputs: int) -> int:
        """The largest for which the sum of `inputs` products with activations fits 32 bits."""
        return min(255, 2**31 // (127 * self.highest * inputs))

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
        multipliers = None
        if self.multiplied:
            wanted, most = scales, self.max_multiplier(inputs)
            scales = wanted.max(1, keepdims=True) / np.float32(most)
            multipliers = np.ceil(wanted / np.where(scales > 0, scales, 1)).clip(1, most).astype(np.uint8)
        made = Encoded(np.empty(0, np.int8 if self.symmetric else np.uint8), scales, None, multipliers)
        # The codes of a group are zero if its numbers are zero or too small for the scale's dtype.
        units = made.units
        wide = np.where(units > 0, units, 1)
        zeros, shifted = None, np.rint(groups / wide[..., None])
        if not self.symmetric:
            zeros = np.clip(np.rint(-low / wide), self.lowest, self.highest).astype(np.uint8)
            shifted += zeros[..., None]
        codes = np.clip(shifted, self.lowest, self.highest).astype(made.codes.dtype)
        if (units <= 0).any():
            codes[units <= 0] = 0 if zeros is None else zeros[units <= 0][..., None]
        return replace(made, codes=codes, zeros=zeros)


@dataclass(frozen=True, slots=True)
class Encoded:
    """codes [outputs, groups, group] int8 or uint8; zeros [outputs, groups] uint8, or None; scales [outputs,
    groups], or with `multipliers` [outputs, groups] uint8 [outputs, 1].
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    multipliers: np.ndarray | None = None

    def rows(self, rows: slice) -> Encoded:
        """The codes of some outputs."""
        zeros, multipliers = (part if part is None else part[rows] for part in (self.zeros, self.multipliers))
        return Encoded(self.codes[rows], self.scales[rows], zeros, multipliers)

    @property
    def units(self) -> np.ndarray:
        """The value of one unit of a code, [outputs, groups] fp32."""
        scales: np.ndarray = self.scales.astype(np.float32)
        return scales if self.multipliers is None else scales * np.float32(self.multipliers)

    def decoded(self) -> np.ndarray:
        """The decoded weight, [outputs, groups, group] fp32."""
        plain: np.ndarray = self.codes.astype(np.float32)
        if self.zeros is not None:
            plain -= self.zeros[..., None]
        plain *= self.units[..., None]
        return plain


@runtime_checkable
class CodeSource(Protocol):
    """Tensors, some with codes that a calibration chose."""

    def holds(self, name: str, codec: Codec) -> bool:
        """Whether weight `name` has codes of the form that `codec` makes."""

    def encoded(self, name: str, scale_dtype: np.dtype[Any]) -> Encoded: ...


MAX_HADAMARD = 64


def rotation(size: int) -> tuple[np.ndarray, np.ndarray]:
    """The orthogonal matrices of a rotation of `size` numbers x [outer, inner]: outer @ x @ inner.

    Both are symmetric, so that the rotation is its own inverse. The numbers of the whole matrix are of about
    the same size: the inner one is Hadamard's, the outer one Hartley's, which has flat rows for every size.
    """
    inner = np.ones((1, 1))
    while len(inner) < math.gcd(size, MAX_HADAMARD):
        inner = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), inner)
    index = np.arange(size // len(inner), dtype=np.float64)
    angles = 2 * math.pi * (index[:, None] * index % len(index)) / len(index)
    outer = (np.cos(angles) + np.sin(angles)) / math.sqrt(len(index))
    return outer.astype(np.float32), (inner / math.sqrt(len(inner))).astype(np.float32)


def pack(codes: np.ndarray, dtype: str) -> bytes:
    """The bytes of an ONNX tensor of `codes`. Two 4-bit codes share a byte, the first in the low half."""
    if not dtype.endswith("int4"):
        return codes.tobytes()
    flat = codes.reshape(-1).view(np.uint8) & 0xF
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    return (flat[0::2] | (flat[1::2] << 4)).tobytes()


def panels_shape(is_grouped: bool, inputs: int, outputs: int) -> tuple[int, ...]:
    blocks = -(-inputs // BLOCK)
    return (
        (-(-outputs // 16), blocks, 9, 16, 4) if is_grouped else (-(-outputs // 32), blocks * 16 + 1, 32, 4)
    )


def in_panels(codes: np.ndarray) -> np.ndarray:
    """int8 codes [in, out] as kernels read them (docs/format.md): [panels, fours + 1, 32, 4]."""
    inputs, outputs = codes.shape
    shape = panels, fours, *_ = panels_shape(False, inputs, outputs)
    rows = np.zeros((panels * 32, (fours - 1) * 4), np.int8)
    rows[:outputs, :inputs] = codes.T
    made = np.empty((panels, fours, 32), "<i4")
    made[:, :-1] = rows.view("<i4").reshape(panels, 32, fours - 1).transpose(0, 2, 1)
    made[:, -1] = rows.sum(1, dtype="<i4").reshape(panels, 32)
    return made.view(np.int8).reshape(shape)


def in_grouped_panels(codes: np.ndarray, zeros: np.ndarray, multipliers: np.ndarray) -> np.ndarray:
    """`multiplied` codes [in, out], zeros, multipliers [groups, out], as uint8 [panels, blocks, 9, 16, 4]."""
    inputs, outputs = codes.shape
    shape = panels, blocks, *_ = panels_shape(True, inputs, outputs)

    def padded(numbers: np.ndarray, height: int) -> np.ndarray:
        whole = np.zeros((height, panels * 16), np.uint8)
        whole[: len(numbers), :outputs] = numbers
        return whole

    made = np.empty(shape, np.uint8)
    # [blocks, groups, halves, fours, inputs, panels, columns]
    parts = padded(codes, blocks * BLOCK).reshape(blocks, 2, 2, 4, 4, panels, 16)
    both = (parts[:, :, 0] | (parts[:, :, 1] << 4)).transpose(4, 0, 1, 2, 5, 3)
    made[:, :, :8] = both.reshape(panels, blocks, 8, 16, 4)
    factors = np.stack([padded(numbers, blocks * 2) for numbers in (multipliers, zeros)])
    factors = factors.reshape(2, blocks, 2, panels, 16).transpose(3, 1, 0, 4, 2)
    made[:, :, 8] = factors.reshape(panels, blocks, 16, 4)
    return made


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a bundle's weights are stored.

    `scheme`: "int4" and "int8" quantize weights only, in groups of `group_size` inputs. "w8a8" has one scale
    for each output channel and also quantizes activations to 8 bits at run time, each token separately. So
    does "w4a8", with weights of 4 bits in groups of 32, except those of the maps that lose most by it.
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
        if self.is_integer:
            if not self.symmetric:
                problems.append(f"--asymmetric is for int4 and int8: {self.scheme} has one form")
            if self.head == "int4":
                problems.append("--head int4 is for --precision int4 and int8")
        elif self.group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            return [f"--group must be one of {sizes}, not {self.group_size}"]
        for name, count in inputs.items():
            size = self.codec(name).group_size
            if size is not None and count % size:
                which = f"groups of {size} inputs do" if self.is_integer else f"--group {size} does"
                problems.append(f"{which} not divide the {count} inputs of {name}")
        return problems

    @property
    def is_integer(self) -> bool:
        """Whether activations are quantized too, so that products are computed in integers."""
        return self.scheme in INTEGER

    @property
    def linear(self) -> Codec:
        """The codec of Linear maps of layers; of most of them in w4a8."""
        if self.scheme == "w4a8":
            return Codec("int4", MULTIPLIED_GROUP, symmetric=False, multiplied=True)
        if self.scheme == "w8a8":
            return Codec("int8", None)
        return Codec(self.scheme, self.group_size, self.symmetric)

    def codec(self, weight: str) -> Codec:
        """The codec of a Linear map, by the name of its weight in the checkpoint or the graph."""
        part = weight.removesuffix(".weight").rpartition(".")[2].removesuffix("_proj")
        return Codec("int8", None) if self.is_integer and part in SENSITIVE else self.linear

    def table(self, kind: str) -> Codec | None:
        """The codec of a vocabulary table. int8 tables have a scale for each row, which can be read alone."""
        if kind == "float":
            return None
        if kind == "int4":
            return Codec("int4", self.group_size, self.symmetric)
        return Codec("int8", None)
