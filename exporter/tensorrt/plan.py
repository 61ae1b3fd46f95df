"""What an engine build will do, decided before anything is built: target, flavor, KV layout, shapes, and whether it can be done here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...runtime.bundle.engine_info import Extent, Range
from ...runtime.bundle.manifest import ModelInfo
from ...runtime.device.cuda import Gpu, find_gpu
from ...runtime.errors import ExportError
from . import build as tensorrt
from .targets import (
    HOST,
    RTX_CAPABILITIES,
    JetPack,
    Target,
    flavor_for,
    jetpack_for,
    layout_for,
    target_named,
)

DEFAULT_CAPACITY, DEFAULT_PREFILL = 1024, 128
MOST_ROWS = 1024
Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
"""Input name -> (min, opt, max) shape."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What `mars-export trt` may be asked for. None: `capacity` 1024 and `prefill` 128, or the model's context if that is less.

    `batch`: most rows of a step; `capacity`: KV entries a row holds; `prefill`: most slots of a step; `static`: one engine for
    exactly `batch` rows of `block` slots. `kv_layout` None: what the target's TensorRT takes.
    """

    target: str = "rtx"
    flavor: str = "auto"
    jetpack: str | None = None
    kv_layout: str | None = None
    batch: int = 1
    capacity: int | None = None
    prefill: int | None = None
    static: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """An engine to make. `obstacle`: why it cannot be built on this machine; the bundle then gets a recipe for the target's own."""

    name: str
    target: Target
    flavor: str
    kv_layout: str
    jetpack: JetPack | None
    batch: int
    block: int
    capacity: int
    ranges: tuple[Range, ...]
    static: bool
    obstacle: str | None

    @property
    def backend(self) -> str:
        return tensorrt.BACKENDS[self.flavor]

    @property
    def fixed_sizes(self) -> dict[str, int]:
        """Symbols of the graph that get numbers."""
        sizes = {"capacity": self.capacity}
        return (
            sizes | {"batch": self.batch, "slots": self.block, "outputs": self.block}
            if self.static
            else sizes
        )

    def inputs(self, model: ModelInfo) -> tuple[Shapes, ...]:
        """Shapes of every input of the step graph, for each range."""
        return tuple(_inputs(r, model, self.capacity) for r in self.ranges)


def make_plan(options: EngineOptions, block: int, context_length: int) -> Plan:
    """Decide. Raises ExportError for unknown or contradictory options, all of a kind at once, and for a host without a GPU."""
    target = _host() if options.target == HOST else target_named(options.target)
    flavor = flavor_for(target, options.flavor)
    jetpack = jetpack_for(target, options.jetpack)
    obstacle = _obstacle(target, flavor)
    layout = _layout(options.kv_layout, flavor, jetpack, obstacle)
    capacity = options.capacity if options.capacity is not None else min(DEFAULT_CAPACITY, context_length)
    prefill = options.prefill if options.prefill is not None else min(DEFAULT_PREFILL, capacity)
    _check_sizes(options, block, capacity, prefill, context_length)
    name = target.name if target.name.startswith(flavor) else f"{flavor}-{target.name}"
    return Plan(
        name=f"{name}-static" if options.static else name,
        target=target,
        flavor=flavor,
        kv_layout=layout,
        jetpack=jetpack,
        batch=options.batch,
        block=block,
        capacity=capacity,
        ranges=_ranges(options, block, prefill),
        static=options.static,
        obstacle=obstacle,
    )


def _host() -> Target:
    gpu = find_gpu()
    if isinstance(gpu, str):
        raise ExportError(
            f"--target host builds for the GPU of this machine, and {gpu}. To build without one, give --target rtx (desktop GPUs: a real"
            " engine, built here) or the target you mean, such as jetson-orin or h100: the bundle then gets a recipe to build on that machine"
        )
    # Both flavors know some GPUs: the desktop one is taken where it is installed.
    is_rtx = gpu.capability in RTX_CAPABILITIES and tensorrt.version("rtx") is not None
    return Target(gpu.capability, "rtx" if is_rtx else "tensorrt", (gpu.capability,), remark=gpu.name)


def _obstacle(target: Target, flavor: str) -> str | None:
    if flavor == "rtx":
        return None
    gpu = find_gpu()
    wanted = ", ".join(target.compute_capabilities)
    if isinstance(gpu, str):
        return f"full TensorRT builds on the GPU it is for ({wanted}), and {gpu}"
    if not _is_own(gpu, target):
        return f"full TensorRT builds on the GPU it is for ({wanted}); this machine has {gpu.name} ({gpu.capability})"
    return None


def _is_own(gpu: Gpu, target: Target) -> bool:
    return gpu.capability in target.compute_capabilities


def _layout(asked: str | None, flavor: str, jetpack: JetPack | None, obstacle: str | None) -> str:
    installed = tensorrt.version(flavor) if obstacle is None else None
    # A recipe for a data centre counts on a present TensorRT; `--kv-layout delta` is for older ones.
    fitting = "static"
    if jetpack is not None:
        fitting = jetpack.kv_layout
    elif flavor == "tensorrt" and installed is not None:
        fitting = layout_for(installed)
    if asked not in (None, "static", "delta"):
        raise ExportError(f"--kv-layout must be static or delta, not {asked}")
    if asked == "static" and fitting == "delta":
        raise ExportError(
            "this target's TensorRT is older than 10.15 and cannot write KV entries in place; leave --kv-layout out, or give delta"
        )
    return asked or fitting


def _check_sizes(
    options: EngineOptions, block: int, capacity: int, prefill: int, context_length: int
) -> None:
    problems = []
    least = 2 * block
    if not least <= capacity <= context_length:
        problems.append(
            f"--capacity must be {least} (two blocks) to {context_length} (the checkpoint's context), not {capacity}"
        )
    if not 1 <= prefill <= capacity:
        problems.append(f"--prefill must be 1 to the capacity, not {prefill}")
    if not 1 <= options.batch <= MOST_ROWS:
        problems.append(f"--batch must be 1 to {MOST_ROWS}, not {options.batch}")
    if problems:
        raise ExportError("; ".join(problems))


def _ranges(options: EngineOptions, block: int, prefill: int) -> tuple[Range, ...]:
    if options.static:
        exact = Extent(block, block, block)
        return (Range("decode", Extent(options.batch, options.batch, options.batch), exact, exact),)
    rows, outputs = Extent(1, options.batch, options.batch), Extent(1, block, block)
    # A full window of cursor commit is a block of pending tokens and a mask for each prediction but the first.
    window = 2 * block - 1
    decode = Range("decode", rows, Extent(1, block, window), outputs)
    if prefill <= window:
        return (decode,)
    return decode, Range("prefill", Extent(1, 1, options.batch), Extent(1, prefill, prefill), outputs)


def _inputs(r: Range, model: ModelInfo, capacity: int) -> Shapes:
    def at(which: str) -> dict[str, tuple[int, ...]]:
        rows, slots, outputs = (getattr(extent, which) for extent in (r.batch, r.slots, r.outputs))
        kv = (rows, model.num_kv_heads, capacity, model.head_dim)
        names = [f"past_key_values.{i}.{kind}" for i in range(model.num_layers) for kind in ("key", "value")]
        return {
            "input_ids": (rows, slots),
            "kv_length": (rows,),
            "output_index": (rows, outputs),
        } | dict.fromkeys(names, kv)

    least, best, most = at("min"), at("opt"), at("max")
    return {name: (least[name], best[name], most[name]) for name in least}
