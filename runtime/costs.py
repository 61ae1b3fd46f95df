"""Where a measured cost table is kept between sessions: one small file in the user's cache folder. A bad file counts as none."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import threading
from dataclasses import dataclass
from pathlib import Path

from .bundle.manifest import Bundle, Variant
from .bundle.profiles import sha256_of
from .decode.cost import Cost

VERSION = 1
MOST_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class CostFile:
    """A file named after everything that the cost of a step depends on, so that another machine or graph finds none."""

    path: Path

    @classmethod
    def of(cls, bundle: Bundle, variant: Variant, device: str, threads: int | None) -> CostFile | None:
        """The file for this variant of a bundle on this machine; None for a user without a home."""
        from .device.ort import version_and_devices

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
            os.cpu_count(),
            platform.machine(),
            _processor(),
        ]
        name = hashlib.sha256(json.dumps([*known, *here]).encode()).hexdigest()[:32]
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        except RuntimeError:
            return None
        return cls(cache / "mars-export" / "costs" / f"{name}.json")

    def read(self) -> Cost | None:
        """The table, or None if there is none that can be used: it is measured again then."""
        try:
            with self.path.open("rb") as file:
                values = json.loads(file.read(MOST_BYTES))
            if not all(type(p) is int and type(s) in (int, float) for p, s in values["points"]):
                return None
            return Cost(tuple((p, float(s)) for p, s in values["points"]))
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None

    def write(self, cost: Cost) -> None:
        """Keep the table. Where that is not possible the next session measures again."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            scratch = self.path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
            scratch.write_text(json.dumps({"points": cost.points}) + "\n", encoding="utf-8")
            os.replace(scratch, self.path)
        except OSError:
            pass


def machine_is_busy() -> bool:
    """Whether more programs than there are processors ran in the last minute, so that what is measured now is not worth keeping."""
    try:
        return os.getloadavg()[0] > (os.cpu_count() or 1)
    except (AttributeError, OSError):  # a system without such a figure
        return False


def _processor() -> str:
    """The processor's name: Linux has it in a file, other systems in `platform`."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
