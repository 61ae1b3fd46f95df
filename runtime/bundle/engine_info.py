"""What a manifest says about a TensorRT engine: what built it, for which GPUs and shapes. Knows
no TensorRT.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from .fields import Rule

RANGE_NAMES = ("decode", "prefill")
Dimension = Annotated[int, Rule(1, 2**20)]


@dataclass(frozen=True, slots=True)
class Extent:
    """What one dimension may be, and what the engine is fastest at."""

    min: Dimension
    opt: Dimension
    max: Dimension

    def wrong(self) -> Iterator[tuple[str, str]]:
        """What contradicts itself in an extent that was read."""
        if not self.min <= self.opt <= self.max:
            yield "", f"min {self.min}, opt {self.opt}, max {self.max} are not in order"

    def __str__(self) -> str:
        return str(self.opt) if self.min == self.max else f"{self.min}-{self.max} (best {self.opt})"

    def holds(self, value: int) -> bool:
        return self.min <= value <= self.max


@dataclass(frozen=True, slots=True)
class Range:
    """Shapes that an engine takes: one TensorRT optimization profile (a `profile` here is a
    calibrated tau).
    """

    name: Annotated[str, Rule(choices=RANGE_NAMES)]
    batch: Extent
    slots: Extent
    outputs: Extent


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """How an engine came about.

    `version`: TensorRT's; `cuda`: the CUDA major version its libraries are for; `platform` such as
    `linux-x86_64`; `compute_capabilities`: the GPUs it runs on, such as `sm86`; `ranges` in the order of its
    optimization profiles; `graph`: the bundle's ONNX file it was built from, and that file's hash; `seconds`
    and `peak_memory` (bytes of host memory): of the build; `tf32`: float32 products may be rounded to TF32.
    """

    version: str
    cuda: str
    platform: str
    compute_capabilities: tuple[str, ...]
    ranges: Annotated[tuple[Range, ...], Rule(most=64)]
    graph: str
    graph_sha256: str
    seconds: float
    peak_memory: int
    tf32: bool = False

    def wrong(self) -> Iterator[tuple[str, str]]:
        """What contradicts itself in an engine that was read."""
        if not self.ranges:
            yield "ranges", "at least one is expected"

    def range_for(self, rows: int, slots: int, outputs: int) -> int | None:
        """Index of the first range that takes this shape, None if there is none."""
        fits = (
            r.batch.holds(rows) and r.slots.holds(slots) and r.outputs.holds(outputs) for r in self.ranges
        )
        return next((i for i, good in enumerate(fits) if good), None)

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
