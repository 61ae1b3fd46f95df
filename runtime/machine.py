"""The resources of this process: memory, cores, processor, GPUs, the user's cache directory.

The details come from Linux; on other systems most of them are unknown.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .errors import SessionError

CPUINFO, BOARD = Path("/proc/cpuinfo"), Path("/proc/device-tree/model")
GPUS = Path("/proc/driver/nvidia/gpus")
MEMINFO = Path("/proc/meminfo")
GROUP, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Instructions that multiply unsigned by signed bytes. All but avx2's add in 32 bits, avx2's in 16.
BYTE_PRODUCTS = {
    "vnni": {"avx512_vnni", "avx_vnni", "amx_int8"},
    "dotprod": {"asimddp", "i8mm"},
    "avx2": {"avx2"},
}
CACHE_VARIABLE = "MARS_EXPORT_CACHE"


def forget_peak() -> bool:
    """Start a new measurement of `peak`. False if the system does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def peak() -> int:
    """The most bytes that this process held at once since `forget_peak` or its start; 0 if unknown."""
    return _kilobytes(Path("/proc/self/status"), "VmHWM") or 0


def trim() -> None:
    """Return freed memory to the system, which glibc otherwise keeps for later allocations."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def available() -> int | None:
    """Bytes that this process may still take, by free memory and control groups; None if unknown."""
    limits = (_kilobytes(MEMINFO, "MemAvailable"), group_left())
    return min((limit for limit in limits if limit is not None), default=None)


def require(num_bytes: int, what: str, advice: str) -> None:
    """Raise SessionError if there are not `num_bytes` of memory for `what`; `advice` is how to need less."""
    free = available()
    if free is not None and num_bytes > free:
        raise SessionError(
            f"not enough memory: {what} takes {num_bytes / 1e6:.0f} MB, {free / 1e6:.0f} MB are free;"
            f" {advice}, or free memory",
            code="out_of_memory",
        )


def group_left() -> int | None:
    """Bytes that the control groups of this process leave it, swap included; None without a limit.

    Cached files count as free memory, because the kernel drops them when memory is short.
    """
    rooms = []
    for group in _groups():
        most, used = _number(group / "memory.max"), _number(group / "memory.current")
        if most is not None and used is not None:
            swap, swap_limit = _kilobytes(MEMINFO, "SwapFree") or 0, _number(group / "memory.swap.max")
            rooms.append(
                most - used + _cached(group) + (swap if swap_limit is None else min(swap, swap_limit))
            )
    return min(rooms, default=None)


def cores() -> int:
    """Logical cores that affinity mask and control groups leave this process, rounded up."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        count = os.cpu_count() or 1
    limits = []
    for group in _groups():
        if limit := re.fullmatch(r"(\d+) (\d+)\s*", _text(group / "cpu.max")):
            limits.append(math.ceil(int(limit[1]) / int(limit[2])))
    return max(1, min([count, *limits]))


def default_threads() -> int | None:
    """Threads of a session by default: None for the library's choice, unless cores are limited."""
    return cores() if cores() < (os.cpu_count() or 1) else None


def load() -> float | None:
    """The average number of running programs in the last minute; None if the system has no such figure."""
    with suppress(OSError):
        return os.getloadavg()[0]
    return None


def processor(cpuinfo: Path = CPUINFO) -> str:
    """The processor's name; on Arm the name of the board, and the implementer and part of its cores."""
    text = _text(cpuinfo)
    if name := re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE):
        return name[1].strip()
    parts = re.findall(
        r"^CPU implementer\s*:\s*(\S+)$.*?^CPU part\s*:\s*(\S+)$", text, re.MULTILINE | re.DOTALL
    )
    names = [_text(BOARD).strip("\0\n"), *(f"Arm {maker}/{part}" for maker, part in sorted(set(parts)))]
    return ", ".join(name for name in names if name) or platform.processor()


def gpus() -> list[str]:
    """Names of this machine's NVIDIA GPUs; empty if the driver does not list them, as on Jetson."""
    texts = [_text(path) for path in sorted(GPUS.glob("*/information"))]
    return [name[1].strip() for text in texts if (name := re.search(r"^Model:(.*)$", text, re.MULTILINE))]


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The names of the processor's instruction sets; empty if unknown."""
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", _text(cpuinfo), re.MULTILINE)
    return frozenset(line[1].split()) if line else frozenset()


def byte_products(cpuinfo: Path = CPUINFO) -> str:
    """How this processor multiplies bytes: vnni, dotprod, avx2, none, or unknown."""
    flags = cpu_flags(cpuinfo)
    kinds = [kind for kind, names in BYTE_PRODUCTS.items() if names & flags]
    return [*kinds, "none" if flags else "unknown"][0]


def cache_dir() -> Path | None:
    """The user's cache directory: `$MARS_EXPORT_CACHE`, else `mars-export` in ~/.cache.

    None for a user without a home.
    """
    try:
        if directory := os.environ.get(CACHE_VARIABLE):
            return Path(directory).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mars-export"
    except RuntimeError:
        return None


def _groups() -> Iterator[Path]:
    """The control group (version 2) of this process, and its parents, whose limits hold too."""
    for line in _text(OWN_GROUPS).splitlines():
        if line.startswith("0::"):
            leaf = GROUP / line[3:].lstrip("/")
            for group in (leaf, *leaf.parents):  # in a container the name may be a path of the host
                if group == GROUP.parent:
                    break
                yield group


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cached(group: Path) -> int:
    """Bytes of cached files in a control group."""
    words = re.findall(r"^(?:in)?active_file (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
    return sum(map(int, words))


def _kilobytes(path: Path, name: str) -> int | None:
    """The bytes of a line such as `MemAvailable:  123 kB`."""
    line = re.search(rf"^{name}:\s+(\d+)", _text(path), re.MULTILINE)
    return int(line[1]) * 1024 if line else None


def _number(path: Path) -> int | None:
    number = re.fullmatch(r"(\d+)\s*", _text(path))
    return int(number[1]) if number else None
