"""The table of machines that engines run on, and which TensorRT builds for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...runtime.errors import ExportError

RTX, FULL = "tensorrt_rtx", "tensorrt"  # backends, as manifests name them
# TensorRT-RTX 1.7 compiles for desktop GPUs only, not for Jetson or a data centre's H100.
RTX_CAPABILITIES = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
# The first TensorRT that writes KV entries in place (KV_CACHE_UPDATE); older ones need the `appended` layout.
IN_PLACE_SINCE = (10, 15)


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of machine.

    `backend`: the TensorRT that builds for it; `is_jetson`: its JetPack decides the version, which is older
    than `IN_PLACE_SINCE` before JetPack 7.2.
    """

    name: str
    backend: str
    compute_capabilities: tuple[str, ...]
    is_jetson: bool = False
    remark: str = ""


# `rtx` excludes Turing: another capability makes every engine larger, and sm75 has no bfloat16.
TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("rtx", RTX, RTX_CAPABILITIES[1:], remark="desktop GPUs from Ampere on: RTX 30, 40, 50"),
        *(Target(name, RTX, (name,)) for name in RTX_CAPABILITIES),
        Target("jetson-orin", FULL, ("sm87",), is_jetson=True),
        Target("jetson-thor", FULL, ("sm110",), is_jetson=True),
        Target("h100", FULL, ("sm90",)),
        Target("h200", FULL, ("sm90",)),
    )
}
HOST = "host"


def layout_for(version: str) -> str:
    """The KV layout for a TensorRT version."""
    return "in-place" if tuple(int(n) for n in version.split(".")[:2]) >= IN_PLACE_SINCE else "appended"


def target_named(name: str) -> Target:
    """A target of the table, which does not include `host`. Raises ExportError for an unknown one."""
    if name not in TARGETS:
        raise ExportError(f"unknown target `{name}` (known: {HOST}, {', '.join(TARGETS)})")
    return TARGETS[name]
