"""What an engine build will do, decided before anything is built: target, backend, KV layout, shapes, and
whether it can be done here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...runtime.bundle.engine_info import Extent, Range
from ...runtime.bundle.manifest import ModelInfo
from ...runtime.device.trt.cuda import find_gpu
from ...runtime.device.trt.engine import installed_version
from ...runtime.errors import ExportError
from .targets import FULL, HOST, RTX, RTX_CAPABILITIES, JetPack, Target, jetpack_for, layout_for, target_named

DEFAULT_CAPACITY, DEFAULT_PREFILL = 1024, 128
MOST_ROWS = 1024
ROW_CAPACITY = 64  # several rows hold a multiple of it: TensorRT's tensors begin at multiples of 256 bytes
PREFIXES = {RTX: "rtx", FULL: "tensorrt"}  # of an engine's name
Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
"""Input name -> (min, opt, max) shape."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What `mars-export trt` may be asked for. None: `capacity` 1024, `prefill` 128, or the model's context
    if less.

    `batch`: most rows of a step; `capacity`: KV entries a row holds; `prefill`: most slots of a step;
    `fixed`: one engine for exactly `batch` rows of `block` slots. `kv_layout` None: what the target's
    TensorRT takes. `build` False: a recipe for another machine even where this one could build.
    `tf32`: float32 products may be rounded to TF32, which is faster.
    """

    target: str = "rtx"
    jetpack: str | None = None
    kv_layout: str | None = None
    batch: int = 1
    capacity: int | None = None
    prefill: int | None = None
    fixed: bool = False
    build: bool = True
    tf32: bool = False
    workspace: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """An engine to make. `obstacle`: why it cannot be built on this machine; the bundle then gets a recipe
    for the target's own.
    """

    name: str
    target: Target
    kv_layout: str
    jetpack: JetPack | None
    batch: int
    block: int
    capacity: int
    ranges: tuple[Range, ...]
    is_fixed: bool
    obstacle: str | None
    tf32: bool = False
    workspace: int | None = None

    @property
    def backend(self) -> str:
        return self.target.backend

    @property
    def fixed_sizes(self) -> dict[str, int]:
        """Symbols of the graph that get numbers."""
        step = {"batch": self.batch, "slots": self.block, "outputs": self.block}
        return {"capacity": self.capacity, **(step if self.is_fixed else {})}

    def inputs(self, model: ModelInfo) -> tuple[Shapes, ...]:
        """Shapes of every input of the step graph, for each range."""
        return tuple(_inputs(r, model, self.capacity) for r in self.ranges)


def make_plan(options: EngineOptions, block: int, context_length: int) -> Plan:
    """Decide. Raises ExportError for unknown or contradictory options, and for a host without a GPU."""
    target = _host() if options.target == HOST else target_named(options.target)
    jetpack = jetpack_for(target, options.jetpack)
    obstacle = _obstacle(target) or (None if options.build else "--no-build was given")
    capacity, prefill = _sizes(options, block, context_length)
    name = target.name if target.name == "rtx" else f"{PREFIXES[target.backend]}-{target.name}"
    return Plan(
        name=f"{name}-fixed" if options.fixed else name,
        target=target,
        kv_layout=_layout(options.kv_layout, target, jetpack, obstacle),
        jetpack=jetpack,
        batch=options.batch,
        block=block,
        capacity=capacity,
        ranges=_ranges(options, block, prefill),
        is_fixed=options.fixed,
        obstacle=obstacle,
        tf32=options.tf32,
        workspace=options.workspace,
    )


def _host() -> Target:
    gpu = find_gpu()
    if isinstance(gpu, str):
        raise ExportError(
            f"--target host builds for the GPU of this machine, and {gpu}. To build without one, give"
            f" --target rtx"
            " (desktop GPUs: a real engine, built here) or the target you mean, such as jetson-orin or h100:"
            " the bundle"
            " then gets a recipe to build on that machine"
        )
    # Both backends know some GPUs: the desktop one is taken where it is installed.
    is_rtx = gpu.capability in RTX_CAPABILITIES and installed_version(RTX) is not None
    return Target(gpu.capability, RTX if is_rtx else FULL, (gpu.capability,), remark=gpu.name)


def _obstacle(target: Target) -> str | None:
    if target.backend == RTX:
        return None
    gpu, needs = (
        find_gpu(),
        f"full TensorRT builds on the GPU it is for ({', '.join(target.compute_capabilities)})",
    )
    if isinstance(gpu, str):
        return f"{needs}, and {gpu}"
    if gpu.capability not in target.compute_capabilities:
        return f"{needs}; this machine has {gpu.name} ({gpu.capability})"
    return None


def _layout(layout: str | None, target: Target, jetpack: JetPack | None, obstacle: str | None) -> str:
    # A recipe for a data centre counts on a present TensorRT; `--kv-layout delta` is for older ones.
    best = "static" if jetpack is None else jetpack.kv_layout
    if jetpack is None and target.backend == FULL and obstacle is None:
        words = installed_version(FULL)
        best = best if words is None else layout_for(tuple(int(n) for n in words.split(".")[:2]))
    if layout not in (None, "static", "delta"):
        raise ExportError(f"--kv-layout must be static or delta, not {layout}")
    if layout == "static" and best == "delta":
        raise ExportError(
            "this target's TensorRT is older than 10.15 and cannot write KV entries in place; leave"
            " --kv-layout out, or give delta"
        )
    return layout or best


def _sizes(options: EngineOptions, block: int, context_length: int) -> tuple[int, int]:
    """Capacity and prefill slots."""
    unit = ROW_CAPACITY if options.batch > 1 else 1
    default = min(DEFAULT_CAPACITY, context_length // unit * unit)
    capacity = options.capacity if options.capacity is not None else default
    prefill = options.prefill if options.prefill is not None else min(DEFAULT_PREFILL, capacity)
    problems, least = [], 2 * block
    if not least <= capacity <= context_length:
        problems.append(
            f"--capacity must be {least} (two blocks) to {context_length} (the checkpoint's context), not"
            f" {capacity}"
        )
    elif capacity % unit:
        problems.append(f"--capacity must be a multiple of {unit} with --batch above 1, not {capacity}")
    if not 1 <= prefill <= capacity:
        problems.append(f"--prefill must be 1 to the capacity, not {prefill}")
    if not 1 <= options.batch <= MOST_ROWS:
        problems.append(f"--batch must be 1 to {MOST_ROWS}, not {options.batch}")
    if problems:
        raise ExportError("; ".join(problems))
    return capacity, prefill


def _ranges(options: EngineOptions, block: int, prefill: int) -> tuple[Range, ...]:
    if options.fixed:
        exact = Extent(block, block, block)
        return (Range("decode", Extent(options.batch, options.batch, options.batch), exact, exact),)
    # A full step of cursor commit is a block of pending tokens, or of proposals, and a mask for each
    # prediction but the first; exact mode asks for the predictions of all of them.
    widest = 2 * block - 1
    outputs = Extent(1, block, widest)
    decode = Range("decode", Extent(1, options.batch, options.batch), Extent(1, block, widest), outputs)
    if prefill <= widest:
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
