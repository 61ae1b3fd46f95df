"""The commands that write bundles: onnx and trt. Parse, one call, print."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..runtime.cli.console import Json, advance, err, out, print_json, progress_bars
from ..runtime.errors import CheckpointError, PrecisionError
from .graph_options import (
    AllowDrift,
    Asymmetric,
    Base,
    CalibrationText,
    Embedding,
    Group,
    Head,
    Logits,
    LongContext,
    MaskToken,
    Metrics,
    NoOracle,
    Quantizer,
    Revision,
    Search,
    Tied,
    TokenizerDirectory,
    TopK,
)

app = typer.Typer()

DEFAULT = "No CHECKPOINT given: using the default one (SmolLM2-135M-Instruct with the embedded MARS adapter)."


@app.command()
def onnx(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="[CHECKPOINT]",
            help="Hugging Face or adapter directory, hub id or .gguf; without it, the default checkpoint.",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="BUNDLE", help="The bundle directory to write.")
    ] = Path("mars.bundle"),
    block: Annotated[
        int,
        typer.Option(
            min=1, help="Slots a decode step is built for; the block the checkpoint was tuned with."
        ),
    ] = 8,
    precision: Annotated[
        str,
        typer.Option(
            help="Of weights: fp32, fp16, bf16 (for TensorRT), int8, int4, w8a8 (activations too), or auto."
        ),
    ] = "fp32",
    device: Annotated[
        str, typer.Option(help="What --precision auto chooses for: cpu (this one), or cuda.")
    ] = "cpu",
    activations: Annotated[
        str, typer.Option(help="What quantized weights are computed in: fp32, fp16 or bf16.")
    ] = "fp32",
    group: Group = 32,
    asymmetric: Asymmetric = False,
    search: Search = False,
    quantizer: Quantizer = "auto",
    calibration_text: CalibrationText = None,
    head: Head = "int8",
    embedding: Embedding = "int8",
    metrics: Metrics = False,
    logits: Logits = False,
    top_k: TopK = 0,
    fixed: Annotated[
        bool,
        typer.Option("--fixed", help="Also write graphs with every dimension fixed, sharing the weights."),
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="Rows of the --fixed graphs.")] = 1,
    capacity: Annotated[
        int, typer.Option(min=1, help="KV entries a row of the --fixed graphs holds.")
    ] = 1024,
    prefill: Annotated[int, typer.Option(min=1, help="Slots of the --fixed prefill graph.")] = 128,
    mask_token: MaskToken = None,
    tokenizer: TokenizerDirectory = None,
    tied: Tied = None,
    long_context: LongContext = False,
    revision: Revision = None,
    base: Base = None,
    kv_layout: Annotated[
        str, typer.Option("--kv-layout", help="static, or delta: plain operators for TensorRT before 10.15.")
    ] = "static",
    allow_drift: AllowDrift = False,
    no_oracle: NoOracle = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing bundle.")] = False,
    as_json: Json = False,
) -> None:
    """Export a MARS checkpoint to a bundle for ONNX Runtime."""
    from ..runtime.bundle.manifest import NEAR_TIES
    from .checkpoint.open import open_checkpoint
    from .export import ExportOptions, export_onnx
    from .precision import choose_precision
    from .tensorrt.engines import is_bundle

    if checkpoint is not None and is_bundle(checkpoint):
        raise CheckpointError(
            f"{checkpoint}: a bundle already, nothing is left to export. Run it:"
            f" `mars-export generate {checkpoint} -p ...`; an engine for it: `mars-export trt {checkpoint}`;"
            " another precision needs its checkpoint"
        )
    if checkpoint is None:
        err.print(DEFAULT)
    is_auto = precision == "auto"
    if is_auto:
        precision, reason = choose_precision(device)
        err.print(f"precision: {precision} ({reason})")
    options = ExportOptions(
        block=block, precision=precision, activations=activations, group=group, asymmetric=asymmetric,
        search=search, head=head, embedding=embedding, metrics=metrics, logits=logits, top_k=top_k,
        fixed=fixed, batch=batch, capacity=capacity, prefill=prefill, allow_drift=allow_drift,
        oracle=not no_oracle, kv_layout=kv_layout, quantizer=quantizer, calibration_text=calibration_text,
    )  # fmt: skip
    with progress_bars() as bars:
        opened = open_checkpoint(
            checkpoint, revision=revision, base=base, mask_token=mask_token, tied=tied,
            tokenizer=tokenizer, long_context=long_context,
        )  # fmt: skip
        _say_which_mask(opened.vocabulary, mask_token)
        _say_which_quantizer(options.quantizer_for(opened))
        try:
            manifest = export_onnx(opened, output, options, force=force, progress=advance(bars))
        except PrecisionError as error:
            if not is_auto:
                raise
            err.print(f"precision: fp32 ({str(error).partition(';')[0]})", markup=False)
            options = replace(options, precision="fp32", quantizer="auto", calibration_text=None)
            manifest = export_onnx(opened, output, options, force=force, progress=advance(bars))
    if as_json:
        print_json({"bundle": str(output), "manifest": json.loads(manifest.to_json())})
        return
    drift, size = manifest.variants[0].drift, sum(f.size for f in manifest.files)
    out.print(
        f"[bold]{output}[/]  {size / 1e6:.0f} MB, {options.precision}, block {block},"
        f" {len(manifest.variants)} graph(s)"
    )
    if drift is not None:
        _say_drift(drift, manifest.variants[0].precision)
    if manifest.variants[0].has_near_ties:
        out.print(f"{options.precision}: {NEAR_TIES}")
    system = "" if checkpoint is not None else " --system 'Reply with tool calls.'"
    out.print(f"try: mars-export chat {output}{system}", markup=False)


@app.command()
def trt(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[CHECKPOINT|BUNDLE]",
            help="A checkpoint as for `onnx`, or a bundle to add an engine to; without it, the default one.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="BUNDLE",
            help="The bundle to write: mars.bundle by default, a given bundle itself.",
        ),
    ] = None,
    block: Annotated[
        int | None, typer.Option(min=1, help="Slots a decode step is built for: 8, or the given bundle's.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Of the weights: fp16 (default), bf16, fp32, int8 or int4; a given bundle has its own."
        ),
    ] = None,
    activations: Annotated[
        str, typer.Option(help="What quantized weights are computed in: fp16, bf16 or fp32.")
    ] = "fp16",
    group: Group = 32,
    search: Search = False,
    quantizer: Quantizer = "auto",
    calibration_text: CalibrationText = None,
    head: Head = "float",
    batch: Annotated[int, typer.Option(min=1, help="Most rows of a step.")] = 1,
    capacity: Annotated[
        int | None,
        typer.Option(min=1, help="KV entries a row holds: 1024, or the model's context if that is less."),
    ] = None,
    prefill: Annotated[
        int | None, typer.Option(min=1, help="Most slots of a prefill step: 128 by default.")
    ] = None,
    target: Annotated[
        str, typer.Option(help="rtx, sm75 ... sm121, host, jetson-orin, jetson-thor, h100 or h200.")
    ] = "rtx",
    jetpack: Annotated[
        str | None, typer.Option(help="JetPack version of a Jetson target: it decides the KV layout.")
    ] = None,
    kv_layout: Annotated[
        str | None,
        typer.Option("--kv-layout", help="static or delta, instead of what the target's TensorRT takes."),
    ] = None,
    fixed: Annotated[
        bool,
        typer.Option("--fixed", help="An engine for exactly --batch rows of --block slots."),
    ] = False,
    build: Annotated[
        bool,
        typer.Option(
            "--build/--no-build", help="Build where that can be done, or write graph and recipe in any case."
        ),
    ] = True,
    tf32: Annotated[
        bool, typer.Option("--tf32", help="Round float32 products to TF32: faster, and less exact.")
    ] = False,
    metrics: Metrics = False,
    logits: Logits = False,
    top_k: TopK = 0,
    mask_token: MaskToken = None,
    tokenizer: TokenizerDirectory = None,
    tied: Tied = None,
    long_context: LongContext = False,
    revision: Revision = None,
    base: Base = None,
    allow_drift: AllowDrift = False,
    no_oracle: NoOracle = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be built, and build nothing.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace an existing bundle or engine; build even if memory looks too small."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Build a TensorRT engine, or where this machine cannot, put a recipe for the target's own there."""
    from ..runtime.bundle.open import open_bundle
    from .checkpoint.open import open_checkpoint
    from .export import ExportOptions
    from .tensorrt.engines import add_engine, export_engine, is_bundle
    from .tensorrt.plan import EngineOptions

    engine = EngineOptions(
        target=target,
        jetpack=jetpack,
        kv_layout=kv_layout,
        batch=batch,
        capacity=capacity,
        prefill=prefill,
        fixed=fixed,
        build=build,
        tf32=tf32,
    )
    if source is None:
        err.print(DEFAULT)
    with progress_bars() as bars:
        if source is not None and is_bundle(source):
            written = output or Path(source)
            outcome = add_engine(
                open_bundle(source),
                written,
                engine,
                precision=precision,
                block=block,
                force=force,
                dry_run=dry_run,
                progress=advance(bars),
            )
        else:
            written = output or Path("mars.bundle")
            graph = ExportOptions(
                block=block or 8, precision=precision or "fp16", activations=activations, group=group,
                search=search, head=head, embedding="float", metrics=metrics, logits=logits, top_k=top_k,
                allow_drift=allow_drift, oracle=not no_oracle, quantizer=quantizer,
                calibration_text=calibration_text,
            )  # fmt: skip
            opened = open_checkpoint(
                source, revision=revision, base=base, mask_token=mask_token, tied=tied,
                tokenizer=tokenizer, long_context=long_context,
            )  # fmt: skip
            _say_which_mask(opened.vocabulary, mask_token)
            if not dry_run:
                _say_which_quantizer(graph.quantizer_for(opened))
            outcome = export_engine(
                opened, written, graph, engine, force=force, dry_run=dry_run, progress=advance(bars)
            )
    if as_json:
        print_json({"bundle": str(written)} | outcome.to_dict())
    else:
        _print_engine(written, outcome)


def _say_which_mask(vocabulary: Any, given: str | None) -> None:
    if given is not None and vocabulary.named_mask not in (None, vocabulary.mask_token):
        err.print(
            f"mask token: --mask-token {vocabulary.mask_token} (id {vocabulary.mask_token_id}) is taken,"
            f" not the tokenizer's own {vocabulary.named_mask}",
            style="yellow",
            markup=False,
        )


def _say_which_quantizer(quantizer: Any) -> None:
    if quantizer is not None and quantizer.reason:
        err.print(quantizer.reason, markup=False)


def _print_engine(bundle: Path, outcome: Any) -> None:
    plan, variant = outcome.plan, outcome.variant
    out.print(
        f"[bold]{bundle}[/]  engine {plan.name} for {', '.join(plan.target.compute_capabilities)},"
        f" {plan.backend}, KV layout {plan.kv_layout}"
    )
    for r in plan.ranges:
        out.print(
            f"  {r.name}: batch {r.batch}, slots {r.slots}, predictions {r.outputs}, capacity {plan.capacity}"
        )
    if variant is not None:
        info, size = variant.engine, next(f.size for f in outcome.manifest.files if f.path == variant.file)
        cost = f"in {info.seconds:.1f} s, {info.peak_memory / 1e9:.1f} GB of memory at most"
        out.print(f"built: {size / 1e6:.0f} MB with {variant.backend} {info.version} {cost}")
        if variant.drift is not None:
            _say_drift(variant.drift, variant.precision)
        out.print(f"try, on that GPU: mars-export chat {bundle} --device cuda")
        return
    if plan.obstacle is None:
        out.print(
            f"dry run: nothing was built; about {outcome.memory / 1e9:.1f} GB of memory would be needed"
        )
        return
    err.print(
        f"No engine {'would be' if outcome.manifest is None else 'was'} built: {plan.obstacle}.",
        style="yellow",
    )
    if outcome.manifest is not None:
        out.print(
            f"The bundle holds a recipe instead; on the device: sh {bundle}/{outcome.recipe}", markup=False
        )


def _say_drift(drift: Any, precision: str) -> None:
    """The verdict first, each figure with its bound; a warning well before one of them is reached."""
    from .check.selfcheck import BOUNDS

    _, confidence, share = BOUNDS[precision]
    places, same, error = drift.positions, drift.argmax_matches, drift.max_confidence_error
    flips = ", ".join(f"{count} at {tau}" for tau, count in (drift.acceptance_flips or {}).items())
    is_good = same >= share * places and error <= confidence
    verdict = "passed" if is_good else "failed"
    line = f"self-check {verdict}: the checkpoint's next token in {same} of {places} places"
    line += f" (at least {math.ceil(share * places)}), confidence error {error:.2g} (at most {confidence:g})"
    line += f", logit error {drift.max_logit_error:.2g}" + (f", acceptance flips {flips}" if flips else "")
    out.print(line + (f"; the checkpoint as {drift.yardstick} reads it" if drift.yardstick else ""))
    if places - same > (1 - share) * places / 2 or error > confidence / 2:
        err.print(
            f"warning: {precision} is far from the checkpoint; take a wider --precision, or measure it on"
            " your own task (docs/quantization.md)",
            style="yellow",
        )
