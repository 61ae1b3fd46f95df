"""The file of learned step costs in the user's cache directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import machine
from ..bundle.files import read_small, write_whole
from ..bundle.manifest import Variant
from ..bundle.open import Bundle
from ..decode.speculation.cost import Learned
from ..device.ort import kernels
from .fingerprint import fingerprint

VERSION = 4
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
        if package := kernels.used(variant.precision, device):
            more += [package.version, package.instructions]
        name = fingerprint(bundle, variant, device, options, *more)
        return cls(cache / "costs" / f"{name}.json")

    def read(self) -> tuple[Learned, ...]:
        """The costs that earlier sessions learned; empty without a valid file."""
        try:
            sizes = json.loads(read_small(self.path, MAX_BYTES))["sizes"]
            return tuple(Learned(int(size), float(ratio), float(weight)) for size, ratio, weight in sizes)
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return ()

    def write(self, learned: Sequence[Learned]) -> None:
        """Write what was learned if possible; otherwise the next session learns again."""
        sizes = [(size.positions, size.ratio, size.weight) for size in learned]
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, (json.dumps({"sizes": sizes}) + "\n").encode("ascii"))
