"""Tables of the machines that engines run on: which TensorRT builds for them, and what each JetPack has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...runtime.errors import ExportError

RTX, FULL = "tensorrt_rtx", "tensorrt"  # backends, as manifests name them
# TensorRT-RTX 1.7 compiles for desktop GPUs only, not for Jetson or a data centre's H100.
RTX_CAPABILITIES = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
# The first TensorRT that writes KV entries in place (KV_CACHE_UPDATE); older ones need the `delta` layout.
IN_PLACE_SINCE = (10, 15)


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of machine. `backend`: the TensorRT that builds for it; `is_jetson`: it has a JetPack."""

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


@dataclass(frozen=True, slots=True)
class JetPack:
    """A release of NVIDIA's Jetson software: its TensorRT version and the targets it runs on."""

    version: str
    tensorrt: tuple[int, int]
    targets: tuple[str, ...]

    @property
    def kv_layout(self) -> str:
        return layout_for(self.tensorrt)


JETPACKS: Mapping[str, JetPack] = {
    jetpack.version: jetpack
    for jetpack in (
        JetPack("6.1", (10, 3), ("jetson-orin",)),
        JetPack("6.2", (10, 3), ("jetson-orin",)),
        JetPack("7.0", (10, 13), ("jetson-thor",)),
        JetPack("7.1", (10, 13), ("jetson-thor",)),
        JetPack("7.2", (10, 16), ("jetson-orin", "jetson-thor")),
    )
}
DEFAULT_JETPACKS = {"jetson-orin": "6.2", "jetson-thor": "7.1"}


def layout_for(version: tuple[int, ...]) -> str:
    """The KV layout for a TensorRT version."""
    return "static" if version >= IN_PLACE_SINCE else "delta"


def target_named(name: str) -> Target:
    """A target of the table, which does not include `host`. Raises ExportError for an unknown one."""
    if name not in TARGETS:
        raise ExportError(f"unknown target `{name}` (known: {HOST}, {', '.join(TARGETS)})")
    return TARGETS[name]


def jetpack_for(target: Target, version: str | None) -> JetPack | None:
    """The JetPack whose TensorRT builds for `target`; None if it is not a Jetson. Raises ExportError for a
    version that is unknown or not for this target.
    """
    if not target.is_jetson:
        if version is not None:
            raise ExportError(f"--jetpack is for the Jetson targets, not for {target.name}")
        return None
    version = version or DEFAULT_JETPACKS[target.name]
    if version not in JETPACKS:
        raise ExportError(f"unknown JetPack `{version}` (known: {', '.join(JETPACKS)})")
    jetpack = JETPACKS[version]
    if target.name not in jetpack.targets:
        others = ", ".join(j.version for j in JETPACKS.values() if target.name in j.targets)
        raise ExportError(f"JetPack {version} is not for {target.name}; give one of {others}")
    return jetpack
