"""What a process has in memory, as Linux counts it: pages of its own, and of files that it has mapped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Resident:
    """In MB (10^6 bytes). `files` can be dropped and read again; `own` cannot. `peak` is of both."""

    own: float
    files: float
    peak: float

    @classmethod
    def of(cls, pid: int) -> Resident:
        """Of a process that runs. Raises OSError for another, and where /proc is not Linux's."""
        found = _kilobytes(Path(f"/proc/{pid}/status"), ("RssAnon", "RssFile", "RssShmem", "VmHWM"))
        own = found["RssAnon"] + found["RssShmem"]
        return cls(*(round(1024 * each / 1e6, 1) for each in (own, found["RssFile"], found["VmHWM"])))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def table(found: Mapping[str, Resident]) -> str:
    lines = ["| system | own, MB | mapped files, MB | peak, MB |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {each.own:.0f} | {each.files:.0f} | {each.peak:.0f} |" for name, each in found.items()
    ]
    return "\n".join(lines)


def _kilobytes(file: Path, names: tuple[str, ...]) -> dict[str, int]:
    fields = (line.split(":", 1) for line in file.read_text(encoding="utf-8").splitlines())
    return {name: int(value.split()[0]) for name, value in fields if name in names}
