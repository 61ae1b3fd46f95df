"""Where a measured cost table is kept between sessions: one small file in the user's cache folder.

A bad file counts as none.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .. import machine
from ..bundle.files import read_small, write_whole
from ..bundle.manifest import Variant
from ..bundle.open import Bundle
from ..bundle.profiles import sha256_of
from ..decode.pace.cost import Cost

VERSION = 2
MOST_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class CostFile:
    """A file named after everything that the cost of a step depends on, so that another machine or graph
    finds none.
    """

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
        from ..device.ort.backend import version_and_devices

        manifest = bundle.manifest
        backend = variant.engine.version if variant.engine is not None else version_and_devices()
        known = [
            VERSION,
            sha256_of(manifest, variant.file),
            sha256_of(manifest, variant.weights),
            variant.precision,
            variant.accuracy_level,
        ]
        here = [
            manifest.block,
            variant.backend,
            backend,
            device,
            threads,
            machine.cores(),
            platform.machine(),
            machine.processor(),
            machine.gpus() if device.startswith("cuda") else [],
            *([sorted(options.items())] if options else []),
        ]
        name = hashlib.sha256(json.dumps([*known, *here]).encode()).hexdigest()[:32]
        cache = machine.cache_dir()
        return cls(cache / "costs" / f"{name}.json") if cache is not None else None

    def read(self) -> Cost | None:
        """The table, or None if there is none that can be used: it is measured again then."""
        try:
            values = json.loads(read_small(self.path, MOST_BYTES))
            if not all(type(p) is int and type(s) in (int, float) for p, s in values["points"]):
                return None
            return Cost(tuple((p, float(s)) for p, s in values["points"]))
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None

    def write(self, cost: Cost) -> None:
        """Keep the table. Where that is not possible the next session measures again."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, (json.dumps({"points": cost.points}) + "\n").encode("ascii"))
        except OSError:
            pass
