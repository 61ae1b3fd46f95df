"""The machine and its user: memory, cores, load, processor, cache directory.

Knows Linux; elsewhere it says less.
"""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from .errors import SessionError

CPUINFO, BOARD = Path("/proc/cpuinfo"), Path("/proc/device-tree/model")
GPUS = Path("/proc/driver/nvidia/gpus")
MEMINFO = Path("/proc/meminfo")
GROUP, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Of a control group, by the version of its files: the limit, what is used, and the limit of swap.
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "-")
VERSION_2 = ("memory.max", "memory.current", "memory.swap.max")
NO_LIMIT = 1 << 60  # version 1 says none by a number as large as it can
# Instructions that multiply unsigned by signed bytes. All but avx2's add in 32 bits, avx2's in 16.
BYTE_PRODUCTS = {
    "vnni": {"avx512_vnni", "avx_vnni", "amx_int8"},
    "dotprod": {"asimddp", "i8mm"},
    "avx2": {"avx2"},
}
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


def require(num_bytes: int, what: str, advice: str) -> None:
    """Raise SessionError where this process cannot have so many bytes for `what`; `advice` says what else to
    do.
    """
    free = available()
    if free is not None and num_bytes > free:
        raise SessionError(
            f"not enough memory: {what} takes {num_bytes / 1e6:.0f} MB, {free / 1e6:.0f} MB are free;"
            f" {advice}, or free memory",
            code="out_of_memory",
        )


def group_left() -> int | None:
    """Bytes that the control groups of this process leave it, swap included, None without a limit.

    What they hold of files counts as free: it goes when others need the room.
    """
    lefts = []
    for group, version in _groups("memory"):
        files = VERSION_1 if version == 1 else VERSION_2
        most, used = _number(group / files[0]), _number(group / files[1])
        if most is not None and used is not None and most < NO_LIMIT:
            swap = _kilobytes(MEMINFO, "SwapFree") or 0
            swap = min([swap, *([] if (more := _number(group / files[2])) is None else [more])])
            lefts.append(most - used + _cached(group) + swap)
    return min(lefts) if lefts else None


def cores() -> int:
    """Logical cores that this process may keep busy: those of its affinity mask, or as many as its control
    group's limit of processor time is worth, rounded up.
    """
    try:
        count = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        count = os.cpu_count() or 1
    limits = []
    for group, version in _groups("cpu"):
        if version == 1:
            quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        else:
            limit = re.fullmatch(r"(\d+) (\d+)\s*", _text(group / "cpu.max"))
            quota, period = (int(limit[1]), int(limit[2])) if limit else (None, None)
        if quota and period:
            limits.append(math.ceil(quota / period))
    return max(1, min([count, *limits]))


def default_threads() -> int | None:
    """Threads of a session where none are asked for: None, the library's own choice, unless this process may
    use a part of the machine only.
    """
    return cores() if cores() < (os.cpu_count() or 1) else None


def load() -> float | None:
    """How many programs ran in the last minute, on average; None on a system without such a figure."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def is_busy() -> bool:
    """Whether more programs than cores ran in the last minute: what is measured now is not worth keeping."""
    return (load() or 0.0) > (os.cpu_count() or 1)


def processor(cpuinfo: Path = CPUINFO) -> str:
    """The processor's name; on Arm that of the board, and the implementer and part of its cores."""
    text = _text(cpuinfo)
    if name := re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE):
        return name[1].strip()
    parts = re.findall(
        r"^CPU implementer\s*:\s*(\S+)$.*?^CPU part\s*:\s*(\S+)$", text, re.MULTILINE | re.DOTALL
    )
    names = [_text(BOARD).strip("\0\n"), *(f"Arm {maker}/{part}" for maker, part in sorted(set(parts)))]
    return ", ".join(name for name in names if name) or platform.processor()


def gpus() -> list[str]:
    """Names of this machine's NVIDIA GPUs; none where the driver has no list of them, as on Jetson."""
    texts = [_text(path) for path in sorted(GPUS.glob("*/information"))]
    return [name[1].strip() for text in texts if (name := re.search(r"^Model:(.*)$", text, re.MULTILINE))]


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Words of the processor's description, its instruction sets among them; empty where unknown."""
    return frozenset(re.findall(r"\w+", _text(cpuinfo)))


def byte_products(cpuinfo: Path = CPUINFO) -> str:
    """How this processor multiplies bytes: vnni, dotprod, avx2, none, or unknown."""
    flags = cpu_flags(cpuinfo)
    kinds = [kind for kind, names in BYTE_PRODUCTS.items() if names & flags]
    return [*kinds, "none" if flags else "unknown"][0]


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


def _groups(kind: str) -> Iterator[tuple[Path, int]]:
    """The control groups of this process that limit `kind`, with those above them, whose limits hold too, and
    the version of their files.
    """
    for line in _text(OWN_GROUPS).splitlines():
        _, kinds, name = line.split(":", 2)
        if kinds and kind not in kinds.split(","):
            continue
        root = GROUP / kind if kinds else GROUP
        own = root / name.lstrip("/")
        for group in (own, *own.parents):  # in a container the name may be one of the machine's
            if group == root.parent:
                break
            yield group, 1 if kinds else 2


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
