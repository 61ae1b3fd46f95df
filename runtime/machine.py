"""The machine and its user: memory, cores, load, processor, cache directory.

Knows Linux; elsewhere it says less.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")
GROUP, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Of a control group, by the version of its files: the limit, what is used, and the limit of swap.
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "-")
VERSION_2 = ("memory.max", "memory.current", "memory.swap.max")
NO_LIMIT = 1 << 60  # version 1 says none by a number as large as it can
CACHE_VARIABLE = "MARS_EXPORT_CACHE"


def forget_peak() -> bool:
    """Begin a new measurement of `peak`. False where that is not allowed: it counts from the
    process's start.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def peak() -> int:
    """The most bytes this process held at once since `forget_peak`; 0 where unknown."""
    return _kilobytes(Path("/proc/self/status"), "VmHWM") or 0


def resident() -> int:
    """The bytes this process holds now; 0 where unknown."""
    return _kilobytes(Path("/proc/self/status"), "VmRSS") or 0


def available() -> int | None:
    """Bytes that this process may still take: free memory, or its control group's limit. None
    where unknown.
    """
    limits = (_kilobytes(MEMINFO, "MemAvailable"), group_left())
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def group_left() -> int | None:
    """Bytes that the control groups of this process leave it, swap included, None without a limit.

    What they hold of files counts as free: it goes when others need the room.
    """
    lefts = []
    for line in _text(OWN_GROUPS).splitlines():
        _, kinds, name = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root, files = (GROUP / "memory", VERSION_1) if kinds else (GROUP, VERSION_2)
        own = root / name.lstrip("/")
        # A limit of any group above holds, too. In a container the name may be one of the machine's.
        for place in (own, *own.parents):
            if place == root.parent:
                break
            most, used = _number(place / files[0]), _number(place / files[1])
            if most is not None and used is not None and most < NO_LIMIT:
                swap = _kilobytes(MEMINFO, "SwapFree") or 0
                swap = min([swap, *([] if (more := _number(place / files[2])) is None else [more])])
                lefts.append(most - used + _cached(place) + swap)
    return min(lefts) if lefts else None


def cores() -> int:
    """Logical cores of the machine; 1 where unknown."""
    return os.cpu_count() or 1


def load() -> float | None:
    """How many programs ran in the last minute, on average; None on a system without such a figure."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def is_busy() -> bool:
    """Whether more programs than cores ran in the last minute: what is measured now is not worth keeping."""
    return (load() or 0.0) > cores()


def processor(cpuinfo: Path = CPUINFO) -> str:
    """The processor's name: Linux has it in a file, other systems in `platform`."""
    found = re.search(r"^model name\s*:\s*(.*)$", _text(cpuinfo), re.MULTILINE)
    return found[1].strip() if found else platform.processor()


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Words of the processor's description, its instruction sets among them; empty where unknown."""
    return frozenset(re.findall(r"\w+", _text(cpuinfo)))


def cache_dir() -> Path | None:
    """Where this user keeps what can be made again: `$MARS_EXPORT_CACHE`, else `mars-export` in ~/.cache.

    None for a user without a home.
    """
    try:
        if chosen := os.environ.get(CACHE_VARIABLE):
            return Path(chosen).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mars-export"
    except RuntimeError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cached(group: Path) -> int:
    """Bytes of files that a control group has in memory."""
    words = re.findall(r"^(?:total_)?(?:in)?active_file (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
    return sum(map(int, words[-2:]))  # version 1 has its own first, and then with all groups below


def _kilobytes(path: Path, name: str) -> int | None:
    """The bytes of a line such as `MemAvailable:  123 kB`."""
    found = re.search(rf"^{name}:\s+(\d+)", _text(path), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _number(path: Path) -> int | None:
    found = re.fullmatch(r"(\d+)\s*", _text(path))
    return int(found[1]) if found else None
