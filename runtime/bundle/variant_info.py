"""The manifest's records of a variant: how its weights are stored, and how its engine was built."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from ..rules import entries, integer, one_of


@dataclass(frozen=True, slots=True)
class QuantizerInfo:
    """The method that chose the codes: "round" or "gptq".

    `text_sha256` is the hash of the calibration text; `sequences` and `tokens` say how much of it was used.
    """

    name: str
    text_sha256: str | None = None
    sequences: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class QuantizationInfo:
    """How the weights of a variant are stored.

    `group_size` inputs share a scale; None means one scale for each output channel. `weight_bits` is the
    width of the codes of Linear weights. `quantizer` is None if it is unknown.
    """

    group_size: Annotated[int | None, integer(1, high=2**53)]
    symmetric: bool
    head: str
    embedding: str
    quantizer: QuantizerInfo | None = None
    weight_bits: int | None = None


RANGE_NAMES = ("decode", "prefill")
PORTABLE = "portable"
Dimension = Annotated[int, integer(1, high=2**20)]


@dataclass(frozen=True, slots=True)
class Extent:
    """The sizes that one dimension may have, and the size that the engine is fastest at."""

    min: Dimension
    opt: Dimension
    max: Dimension

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if not self.min <= self.opt <= self.max:
            yield "", f"min {self.min}, opt {self.opt}, max {self.max} are not in order"

    def __str__(self) -> str:
        return str(self.opt) if self.min == self.max else f"{self.min}-{self.max} (best {self.opt})"

    def holds(self, value: int) -> bool:
        return self.min <= value <= self.max


@dataclass(frozen=True, slots=True)
class ShapeRange:
    """Shapes that an engine takes: one optimization profile of TensorRT."""

    name: Annotated[str, one_of(RANGE_NAMES)]
    batch: Extent
    slots: Extent
    outputs: Extent


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """How an engine was built, and where it runs.

    version: of TensorRT
    cuda: major version of CUDA that its libraries are for
    platform: such as `linux-x86_64`
    compute_capabilities: the GPUs it runs on, such as `sm86`; `portable`: those that TensorRT-RTX accepts
    ranges: its shapes, in the order of its optimization profiles
    graph: the ONNX file of the bundle that it was built from
    graph_sha256: the hash of that file
    seconds: duration of the build
    peak_memory: bytes of host memory that the build took
    tf32: whether float32 products may be rounded to TF32
    """

    version: str
    cuda: str
    platform: str
    compute_capabilities: tuple[str, ...]
    ranges: Annotated[tuple[ShapeRange, ...], entries(64)]
    graph: str
    graph_sha256: str
    seconds: float
    peak_memory: int
    tf32: bool = False

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if not self.ranges:
            yield "ranges", "at least one is expected"

    def range_for(self, rows: int, slots: int, outputs: int) -> int | None:
        """Index of the first range that takes this shape, or None."""
        for i, r in enumerate(self.ranges):
            if r.batch.holds(rows) and r.slots.holds(slots) and r.outputs.holds(outputs):
                return i
        return None

    @property
    def max_rows(self) -> int:
        return max(r.batch.max for r in self.ranges)

    @property
    def max_slots(self) -> int:
        return max(r.slots.max for r in self.ranges)

    @property
    def max_outputs(self) -> int:
        return max(r.outputs.max for r in self.ranges)


def this_platform() -> str:
    """The operating system and processor of this machine, such as `linux-x86_64`."""
    return f"{platform.system()}-{platform.machine()}".lower()
