"""Host memory of an engine build: what it will take, and what there is. Knows Linux; elsewhere it does not know."""

from __future__ import annotations

from pathlib import Path

from ...runtime.errors import ExportError

# Measured with TensorRT-RTX 1.7 on models of 135M to 1.5B parameters: about 3.1 times the weights above the process itself.
FACTOR, BASE = 3.1, 500_000_000


def estimate(weight_bytes: int) -> int:
    """Bytes that building an engine from so many bytes of weights is expected to take."""
    return int(FACTOR * weight_bytes) + BASE


def available() -> int | None:
    """Bytes that this process may still take: the machine's free memory or its control group's limit. None where unknown."""
    limits = [_meminfo("MemAvailable")]
    group = Path("/sys/fs/cgroup")
    most, used = _number(group / "memory.max"), _number(group / "memory.current")
    if most is not None and used is not None:
        limits.append(most - used)
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def require(weight_bytes: int, force: bool) -> None:
    """Raise ExportError when the build is not expected to fit and `force` is not given."""
    needed, there = estimate(weight_bytes), available()
    if there is not None and needed > there and not force:
        raise ExportError(
            f"building an engine from {weight_bytes / 1e9:.2f} GB of weights takes about {needed / 1e9:.1f} GB of memory and {there / 1e9:.1f} GB are"
            " available; close other programs, use a narrower --precision or a larger machine, or try all the same with --force"
        )


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
