"""Decides what to build before a build: target, backend, KV layout, shapes, and whether this machine can; if
not, writes the recipe for the engine's own machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...runtime.bundle.manifest import ModelInfo
from ...runtime.bundle.variant_info import PORTABLE, Extent, ShapeRange
from ...runtime.device.cuda import find_gpu
from ...runtime.device.trt.engine import installed_version
from ...runtime.errors import ExportError
from ..export_options import EngineOptions, out_of_range

RTX, FULL = "tensorrt_rtx", "tensorrt"  # backends, as manifests name them
# TensorRT-RTX 1.7 compiles for desktop GPUs only, not for Jetson or a data centre's H100.
RTX_CAPABILITIES = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
# The first TensorRT that writes KV entries in place (KV_CACHE_UPDATE); older ones need the `appended` layout.
IN_PLACE_SINCE = (10, 15)
LAYOUTS = ("in-place", "appended")
# The workspace limit on GPUs that share the system's memory. Without one TensorRT tries what takes most of
# it, and the system ends the build.
SHARED_WORKSPACE = 1 << 30


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of machine.

    `backend`: the TensorRT that builds for it; `is_integrated`: its GPU uses the system's memory, as on a
    Jetson, whose JetPack decides TensorRT's version: older than `IN_PLACE_SINCE` before JetPack 7.2.
    """

    name: str
    backend: str
    compute_capabilities: tuple[str, ...]
    is_integrated: bool = False


# `rtx` excludes Turing: another capability makes every engine larger, and sm75 has no bfloat16.
TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("rtx", RTX, RTX_CAPABILITIES[1:]),
        Target(PORTABLE, RTX, (PORTABLE,)),
        *(Target(name, RTX, (name,)) for name in RTX_CAPABILITIES),
        Target("jetson-orin", FULL, ("sm87",), is_integrated=True),
        Target("jetson-thor", FULL, ("sm110",), is_integrated=True),
        Target("h100", FULL, ("sm90",)),
        Target("h200", FULL, ("sm90",)),
    )
}
HOST = "host"


def layout_for(version: str) -> str:
    """The KV layout for a TensorRT version."""
    return "in-place" if tuple(int(n) for n in version.split(".")[:2]) >= IN_PLACE_SINCE else "appended"


ROW_CAPACITY = 64  # the unit of capacities with several rows: TensorRT aligns tensors to 256 bytes
PREFIXES = {RTX: "rtx", FULL: "tensorrt"}  # of an engine's name
Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
"""Input name -> (min, opt, max) shape."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The plan of an engine.

    `reason`: why this machine cannot build it; the bundle then gets a recipe. `kv_layouts`: of its graph, or
    of the graphs of a recipe, for which the TensorRT there decides.
    """

    name: str
    target: Target
    kv_layouts: tuple[str, ...]
    batch: int
    block: int
    capacity: int
    ranges: tuple[ShapeRange, ...]
    is_fixed: bool
    reason: str | None
    tf32: bool = False
    workspace: int | None = None

    @property
    def backend(self) -> str:
        return self.target.backend

    @property
    def kv_layout(self) -> str:
        """The layout of the engine, or of a recipe's first graph."""
        return self.kv_layouts[0]

    @property
    def fixed_sizes(self) -> dict[str, int]:
        """The numbers that replace symbolic dimensions of the graph."""
        step = {"batch": self.batch, "slots": self.block, "outputs": self.block}
        return {"capacity": self.capacity, **(step if self.is_fixed else {})}

    def inputs(self, model: ModelInfo) -> tuple[Shapes, ...]:
        """Shapes of every input of the step graph, for each range."""
        return tuple(_inputs(r, model, self.capacity) for r in self.ranges)


def make_plan(options: EngineOptions, block: int, context_length: int) -> EnginePlan:
    """Plan an engine. Raises ExportError for unknown or contradictory options or a host without a GPU."""
    if options.target not in (HOST, *TARGETS):
        what = f"unknown target `{options.target}` (known: {HOST}, {', '.join(TARGETS)})"
        raise ExportError(what, field="target")
    target = _host() if options.target == HOST else TARGETS[options.target]
    reason = _reason(target) or (None if options.build else "--no-build was given")
    capacity, prefill = _sizes(options, block, context_length)
    name = target.name if target.name == "rtx" else f"{PREFIXES[target.backend]}-{target.name}"
    return EnginePlan(
        name=f"{name}-fixed" if options.fixed else name,
        target=target,
        kv_layouts=_layouts(options.kv_layout, target, reason),
        batch=options.batch,
        block=block,
        capacity=capacity,
        ranges=_ranges(options, block, prefill),
        is_fixed=options.fixed,
        reason=reason,
        tf32=options.tf32,
        workspace=options.workspace or (SHARED_WORKSPACE if target.is_integrated else None),
    )


def _host() -> Target:
    gpu = find_gpu()
    if isinstance(gpu, str):
        raise ExportError(
            f"--target host builds for the GPU of this machine, but {gpu}. To build without a GPU, give"
            " --target rtx (an engine for desktop GPUs, built here), or a target such as jetson-orin or h100"
            " (a recipe to build the engine on that machine)"
        )
    # Both backends support some GPUs: prefer TensorRT-RTX if it is installed.
    is_rtx = gpu.capability in RTX_CAPABILITIES and installed_version(RTX) is not None
    return Target(gpu.capability, RTX if is_rtx else FULL, (gpu.capability,), gpu.is_integrated)


def _reason(target: Target) -> str | None:
    if target.backend == RTX:
        return None
    gpu, capabilities = find_gpu(), ", ".join(target.compute_capabilities)
    needs = f"full TensorRT builds only on the target GPU ({capabilities})"
    if isinstance(gpu, str):
        return f"{needs}, and {gpu}"
    if gpu.capability not in target.compute_capabilities:
        return f"{needs}; this machine has {gpu.name} ({gpu.capability})"
    return None


def _layouts(layout: str | None, target: Target, reason: str | None) -> tuple[str, ...]:
    version = installed_version(FULL) if target.backend == FULL and reason is None else None
    best = layout_for(version) if version is not None else "in-place"
    if layout == "in-place" and best == "appended":
        raise ExportError(
            f"TensorRT {version} is older than 10.15 and cannot write KV entries in place; leave"
            " --kv-layout out, or give appended"
        )
    if layout is None and reason is not None and target.is_integrated:
        return LAYOUTS  # JetPack decides on the version there
    return (layout or best,)


def _sizes(options: EngineOptions, block: int, context_length: int) -> tuple[int, int]:
    """Capacity and prefill slots."""
    unit = ROW_CAPACITY if options.batch > 1 else 1
    capacity, prefill = options.sizes(context_length // unit * unit)
    problems = out_of_range(options) + options.problems(2 * block, context_length)
    if not problems and capacity % unit:
        problems.append(f"--capacity must be a multiple of {unit} with --batch above 1, not {capacity}")
    if problems:
        raise ExportError("; ".join(problems), field="options")
    return capacity, prefill


def _ranges(options: EngineOptions, block: int, prefill: int) -> tuple[ShapeRange, ...]:
    if options.fixed:
        exact = Extent(block, block, block)
        return (ShapeRange("decode", Extent(options.batch, options.batch, options.batch), exact, exact),)
    # The widest step has a block of pending tokens, or of draft tokens, and a mask for each prediction but
    # the first. Exact mode needs the predictions of all of them.
    widest = 2 * block - 1
    outputs = Extent(1, block, widest)
    decode = ShapeRange("decode", Extent(1, options.batch, options.batch), Extent(1, block, widest), outputs)
    if prefill <= widest:
        return (decode,)
    return decode, ShapeRange("prefill", Extent(1, 1, options.batch), Extent(1, prefill, prefill), outputs)


def _inputs(r: ShapeRange, model: ModelInfo, capacity: int) -> Shapes:
    def at(which: str) -> dict[str, tuple[int, ...]]:
        rows, slots, outputs = (getattr(extent, which) for extent in (r.batch, r.slots, r.outputs))
        kv = (rows, model.num_kv_heads, capacity, model.head_dim)
        names = [f"past_key_values.{suffix}" for suffix in model.kv_suffixes]
        return {
            "input_ids": (rows, slots),
            "kv_length": (rows,),
            "output_index": (rows, outputs),
        } | dict.fromkeys(names, kv)

    smallest, best, largest = at("min"), at("opt"), at("max")
    return {name: (smallest[name], best[name], largest[name]) for name in smallest}


RECIPE_FILE = "build-on-device.sh"


def recipe(plan: EnginePlan) -> str:
    """The text of the script."""
    needed = "10.3" if "appended" in plan.kv_layouts else "10.15"
    words = [
        "mars-export trt . --target host",
        *([f"--kv-layout {plan.kv_layout}"] if len(plan.kv_layouts) == 1 else []),
        f"--batch {plan.batch} --capacity {plan.capacity} --prefill {plan.ranges[-1].slots.max}",
        *(["--fixed"] if plan.is_fixed else []),
        *(["--tf32"] if plan.tf32 else []),
        *([f"--workspace {plan.workspace >> 20}M"] if plan.workspace else []),
    ]
    return f"""#!/bin/sh
# Builds the TensorRT engine of this bundle on the machine it is for: {plan.target.name}
# ({", ".join(plan.target.compute_capabilities)}), with TensorRT {needed} or newer.
# It was not built with the bundle: {plan.reason}.
#
# Run it on the device: sh {RECIPE_FILE}
# It needs: pip install 'mars-export[{"jetson" if plan.target.is_integrated else "trt,export"}]'
set -eu
cd "$(dirname "$0")"
exec {" ".join(words)}
"""
