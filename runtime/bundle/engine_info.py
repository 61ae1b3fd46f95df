"""What a manifest says about a TensorRT engine: what built it, for which GPUs and shapes. Knows no TensorRT."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from .fields import Fields

RANGE_NAMES = ("decode", "prefill")


@dataclass(frozen=True, slots=True)
class Extent:
    """What one dimension may be, and what the engine is fastest at."""

    min: int
    opt: int
    max: int

    def __str__(self) -> str:
        return str(self.opt) if self.min == self.max else f"{self.min}-{self.max} (best {self.opt})"

    def holds(self, value: int) -> bool:
        return self.min <= value <= self.max


@dataclass(frozen=True, slots=True)
class Range:
    """Shapes that an engine takes: one TensorRT optimization profile (a `profile` here is a calibrated tau)."""

    name: str
    batch: Extent
    slots: Extent
    outputs: Extent


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """How an engine came about.

    `version`: TensorRT's; `cuda`: the CUDA major version its libraries are for; `platform` such as `linux-x86_64`;
    `compute_capabilities`: the GPUs it runs on, such as `sm86`; `ranges` in the order of its optimization profiles; `graph`:
    the bundle's ONNX file it was built from, and that file's hash; `seconds` and `peak_memory` (bytes of host memory): of the build.
    """

    version: str
    cuda: str
    platform: str
    compute_capabilities: tuple[str, ...]
    ranges: tuple[Range, ...]
    graph: str
    graph_sha256: str
    seconds: float
    peak_memory: int

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


def read_engine(fields: Fields) -> EngineInfo:
    """The `engine` object of a variant; notes problems in `fields`."""
    ranges = tuple(_read_range(f) for f in fields.objects("ranges"))
    if not ranges:
        fields.wrong("ranges", "at least one is expected")
    return EngineInfo(
        version=fields.text("version"),
        cuda=fields.text("cuda"),
        platform=fields.text("platform"),
        compute_capabilities=fields.texts("compute_capabilities"),
        ranges=ranges,
        graph=fields.text("graph"),
        graph_sha256=fields.text("graph_sha256"),
        seconds=fields.number("seconds"),
        peak_memory=fields.integer("peak_memory"),
    )


def _read_range(fields: Fields) -> Range:
    return Range(
        fields.text("name", RANGE_NAMES),
        *(_read_extent(fields.object(name)) for name in ("batch", "slots", "outputs")),
    )


def _read_extent(fields: Fields) -> Extent:
    extent = Extent(*(fields.integer(name, 1, 2**20) for name in ("min", "opt", "max")))
    if not extent.min <= extent.opt <= extent.max:
        fields.wrong("", f"min {extent.min}, opt {extent.opt}, max {extent.max} are not in order")
    return extent
