"""The file of a measured cost table in the user's cache directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import machine
from ..bundle.files import read_small, write_whole
from ..bundle.manifest import Variant
from ..bundle.open import Bundle
from ..decode.speculation.cost import Cost
from ..device.ort import kernels
from .fingerprint import fingerprint

VERSION = 3
MAX_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class CostFile:
    """A file whose name depends on everything that affects the cost of a step, such as the machine."""

    path: Path

    @classmethod
    def of(
        cls,
        bundle: Bundle,
        variant: Variant,
        device: str,
        threads: int | None,
        options: Mapping[str, str] | None = None,
    ) -> CostFile | None:
        """The file for this variant of a bundle on this machine; None for a user without a home."""
        cache = machine.cache_dir()
        if cache is None:
            return None
        more: list[Any] = [VERSION, bundle.manifest.block, threads, machine.cores()]
        if variant.precision == kernels.PRECISION and (package := kernels.installed()):
            more += [package.version, package.instructions]
        name = fingerprint(bundle, variant, device, options, *more)
        return cls(cache / "costs" / f"{name}.json")

    def read(self) -> Cost | None:
        """The table; None if there is no valid one, so that it is measured again."""
        try:
            points = json.loads(read_small(self.path, MAX_BYTES))["points"]
            return Cost(tuple((int(slots), float(seconds)) for slots, seconds in points))
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None

    def write(self, cost: Cost) -> None:
        """Write the table if possible; otherwise the next session measures again."""
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, (json.dumps({"points": cost.points}) + "\n").encode("ascii"))
