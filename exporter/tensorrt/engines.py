"""Writes a TensorRT engine into a bundle, or a recipe to build it on another machine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from ...runtime.bundle.files import MANIFEST_FILE, FileEntry, describe, link_or_copy
from ...runtime.bundle.manifest import INTEGER, Manifest, Variant
from ...runtime.bundle.open import Bundle, rewrite, write_manifest
from ...runtime.bundle.variant_info import EngineInfo, QuantizationInfo, this_platform
from ...runtime.errors import ExportError
from ..checkpoint.open import Checkpoint
from ..codes import Quantization
from ..export import Progress, keeping, reopen, weight_bytes, write_bundle, writing
from ..export_options import FLOATS, PRECISIONS, EngineOptions, ExportOptions
from ..graph.nodes import fixed
from ..option_rules import check_options
from . import build as tensorrt
from .plan import FULL, RECIPE_FILE, EnginePlan, make_plan, recipe


@dataclass(frozen=True, slots=True)
class EngineResult:
    """The result, or the plan alone if `manifest` is None. `memory`: expected bytes of the build."""

    plan: EnginePlan
    memory: int
    manifest: Manifest | None

    @property
    def variant(self) -> Variant | None:
        """The engine's entry in the manifest; None if no engine was built."""
        variants = self.manifest.variants if self.manifest else ()
        return next((v for v in variants if v.name == self.plan.name), None)

    @property
    def recipe(self) -> str | None:
        """The name of the bundle's build-on-device file, if it has one instead of an engine."""
        return RECIPE_FILE if self.manifest is not None and self.plan.reason is not None else None

    def to_dict(self) -> dict[str, Any]:
        built = self.variant
        return {
            "name": self.plan.name,
            "plan": asdict(self.plan),
            "expected_memory": self.memory,
            "built": built is not None,
            "recipe": self.recipe,
            "variant": asdict(built) if built is not None else None,
        }


def is_bundle(source: str) -> bool:
    """Whether `source` is a bundle rather than a checkpoint."""
    return (Path(source).expanduser() / MANIFEST_FILE).is_file()


def export_engine(
    checkpoint: Checkpoint,
    output: Path,
    graph: ExportOptions,
    engine: EngineOptions,
    *,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> EngineResult:
    """Write a new bundle with an engine. The engine's target decides the KV layout, not `graph.kv_layout`.

    Raises ExportError, before anything is written, for bad options, and without `force` for an existing
    output or too little memory.
    """
    _refuse_model(checkpoint.dims.mtp is not None, checkpoint.dims.recurrent is not None)
    check_options(graph, checkpoint.dims)
    plan = make_plan(engine, graph.block, checkpoint.dims.context_length)
    _refuse_unreadable(plan, graph.precision, graph.quantization)
    size = weight_bytes(checkpoint, graph)
    estimate = _estimate(plan, size, force)
    if dry_run:
        return EngineResult(plan, estimate, None)
    report = progress or (lambda phase, done, total: None)
    with writing(output, 3 * size, force) as directory, keeping(output) as kept:
        # Level 0, because TensorRT multiplies with the decoded weights, unlike ONNX Runtime's faster levels.
        exact = replace(graph, kv_layout=plan.kv_layout, accuracy_level=0)
        manifest = write_bundle(directory, checkpoint, exact, report, plan.kv_layouts[1:], kept)
        built = _built(directory, manifest, manifest.variants[0], plan, report)
        return EngineResult(plan, estimate, _write(directory, _added(manifest, plan.name, *built), output))


def add_engine(
    bundle: Bundle,
    output: Path,
    engine: EngineOptions,
    *,
    precision: str | None = None,
    block: int | None = None,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> EngineResult:
    """Add an engine to a bundle, in place if `output` is the bundle itself, else to a copy.

    `precision` and `block`, if given, must be those of the bundle's graphs. `force` also replaces an engine
    of the same name. Raises ExportError. The bundle stays unchanged until the engine is complete.
    """
    manifest = bundle.manifest
    _refuse_model(bool(manifest.model.mtp_drafts), manifest.model.recurrent is not None)
    plan = make_plan(engine, manifest.block, manifest.model.context_length)
    variant = _graph_for(bundle, plan, precision, block)
    if not force and any(v.name == plan.name for v in manifest.variants):
        raise ExportError(f"{bundle.path} has an engine `{plan.name}` already; give --force to replace it")
    size = sum(f.size for f in manifest.files if f.path == variant.weights)
    estimate = _estimate(plan, size, force)
    if dry_run:
        return EngineResult(plan, estimate, None)
    report = progress or (lambda phase, done, total: None)
    in_place = output.exists() and output.resolve() == bundle.path.resolve()
    if in_place:
        with tempfile.TemporaryDirectory(prefix=f".{plan.name}-", dir=output.resolve().parent) as place:
            work = Path(place)
            for name in filter(None, (variant.file, variant.weights)):
                link_or_copy(bundle.path / name, work / name)
            entry, files = _built(work, manifest, variant, plan, report)
            new = {file.path: (work / file.path).read_bytes() for file in files}

        def change(now: Manifest) -> Manifest:
            if variant not in now.variants:
                raise ExportError(f"{bundle.path} was replaced while the engine was built; build it again")
            return _added(now, plan.name, entry, files)

        return EngineResult(plan, estimate, rewrite(output, change, new))
    with writing(output, 4 * size, force) as directory:
        for file in manifest.files:
            shutil.copy2(bundle.path / file.path, directory / file.path)
        manifest = _added(manifest, plan.name, *_built(directory, manifest, variant, plan, report))
        return EngineResult(plan, estimate, _write(directory, manifest, output))


def _refuse_model(has_mtp: bool, is_recurrent: bool) -> None:
    if is_recurrent:
        raise ExportError("recurrent layers run on ONNX Runtime's CPU only: mars-export onnx CHECKPOINT")
    if has_mtp:
        raise ExportError(
            "an MTP layer runs on ONNX Runtime only; for TensorRT leave it out: mars-export trt CHECKPOINT"
            " --no-masks"
        )


def _refuse_unreadable(
    plan: EnginePlan, precision: str, stored: Quantization | QuantizationInfo | None
) -> None:
    """Raise ExportError for integer weights that TensorRT would refuse late, and perhaps on the device."""
    if precision in INTEGER:
        raise ExportError(
            f"{precision} is computed with integer operators for CPUs; build from the checkpoint instead,"
            " with `mars-export trt CHECKPOINT --precision fp16` (or int8, int4, bf16, fp32)"
        )
    if stored is None:
        return
    if stored.embedding != "float":
        raise ExportError(
            "TensorRT cannot look rows up in an int8 embedding; build from the checkpoint instead, with"
            " `mars-export trt CHECKPOINT`, which keeps the embedding in float"
        )
    if not stored.symmetric:
        raise ExportError(
            "the weights of this bundle have zero points, which TensorRT does not read; build from the"
            " checkpoint instead, with `mars-export trt CHECKPOINT`, which stores none"
        )
    if plan.backend == FULL and precision == "int8":
        raise ExportError(
            f"the TensorRT of {plan.target.name} reads no int8 weights in groups, only TensorRT-RTX does;"
            " give --precision int4 or fp16"
        )


def _estimate(plan: EnginePlan, size: int, force: bool) -> int:
    if plan.reason is None:
        tensorrt.load(plan.backend)  # a missing TensorRT is reported before minutes of export
        tensorrt.require(size, force)
    return tensorrt.memory(size)


def _graph_for(bundle: Bundle, plan: EnginePlan, precision: str | None, block: int | None) -> Variant:
    """The graph in the plan's first KV layout. Raises ExportError if one is missing in any of them."""
    manifest = bundle.manifest
    if block is not None and block != manifest.block:
        raise ExportError(
            f"{bundle.path} is a bundle of block {manifest.block}, not {block}; leave --block out or give"
            f" the checkpoint",
            field="block",
        )
    if precision is not None and precision not in PRECISIONS:
        what = f"--precision must be one of {', '.join(PRECISIONS)}, not {precision}"
        raise ExportError(what, field="precision")
    name = FLOATS.get(precision or "", precision)
    graphs = [v for v in manifest.variants if v.backend == "onnx" and not v.is_fixed]
    found = {v.kv_layout: v for v in reversed(graphs) if name in (None, v.precision)}
    lacking = [layout for layout in plan.kv_layouts if layout not in found]
    if not lacking:
        v = found[plan.kv_layout]
        _refuse_unreadable(plan, v.precision, v.quantization)
        return v
    others = ", ".join(dict.fromkeys(f"{v.precision} {v.kv_layout}" for v in graphs)) or "none"
    raise ExportError(
        f"{bundle.path} has no {f'{name} ' if name else ''}graph in the {lacking[0]} KV layout, which"
        f" this target needs"
        f" (it has: {others}); make a new bundle from the checkpoint: mars-export trt CHECKPOINT -o BUNDLE"
    )


def _added(manifest: Manifest, name: str, variant: Variant | None, files: Sequence[FileEntry]) -> Manifest:
    """`manifest` with the results of a build, by name in place of earlier ones. No `variant`: a recipe."""
    names = {entry.path for entry in files}
    kept = (entry for entry in manifest.files if entry.path not in names)
    variants = tuple(v for v in manifest.variants if v.name != name)
    return replace(
        manifest,
        variants=variants if variant is None else (*variants, variant),
        files=tuple(sorted((*kept, *files), key=lambda entry: entry.path)),
    )


def _built(
    directory: Path, manifest: Manifest, variant: Variant, plan: EnginePlan, report: Progress
) -> tuple[Variant | None, list[FileEntry]]:
    """Write the engine of the graph `variant`, or the recipe for it, to a directory with the bundle's files.
    Returns the engine's entry for the manifest, and the new files.
    """
    if plan.reason is not None:
        script = directory / RECIPE_FILE
        script.write_text(recipe(plan), encoding="utf-8")
        return None, [describe(script)]
    graph, file = directory / f"{plan.name}.onnx", directory / f"{plan.name}.engine"
    onnx.save(fixed(onnx.load(directory / variant.file, load_external_data=False), plan.fixed_sizes), graph)
    built = tensorrt.build(plan, graph, manifest.model, variant.kv_dtype == "float32", report)
    file.write_bytes(built.data)
    read = describe(graph)
    return _entry(variant, plan, built, read), [read, describe(file)]


def _write(directory: Path, manifest: Manifest, target: Path) -> Manifest:
    """Write the manifest of a complete directory and check that it opens."""
    write_manifest(directory, manifest)
    reopen(directory, target)
    return manifest


def _entry(variant: Variant, plan: EnginePlan, built: tensorrt.Built, graph: FileEntry) -> Variant:
    info = EngineInfo(
        version=built.version,
        cuda=built.cuda,
        platform=this_platform(),
        compute_capabilities=plan.target.compute_capabilities,
        ranges=plan.ranges,
        graph=graph.path,
        graph_sha256=graph.sha256,
        seconds=round(built.seconds, 2),
        peak_memory=built.peak_memory,
        tf32=plan.tf32,
    )
    shape = {"batch": plan.batch, "slots": plan.block} if plan.is_fixed else {"batch": None, "slots": None}
    return replace(
        variant,
        name=plan.name,
        backend=plan.backend,
        file=f"{plan.name}.engine",
        weights=None,
        capacity=plan.capacity,
        engine=info,
        **shape,
    )
