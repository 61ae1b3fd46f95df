"""The commands `onnx` and `trt`, which write bundles."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..runtime.errors import CheckpointError, ExportError, PrecisionError
from ..runtime.terminal.console import advance, err, out, print_json, progress_bars
from ..runtime.terminal.options import Json, option, takes_options
from .export_options import EngineOptions, ExportOptions, GraphOptions

if TYPE_CHECKING:
    from ..runtime.bundle.manifest import ParityReport
    from .checkpoint.open import Checkpoint
    from .tensorrt.engines import EngineResult


DEFAULT = "No CHECKPOINT given: using the default one (SmolLM2-135M-Instruct with the embedded MARS adapter)."


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """How a checkpoint is read.

    How the checkpoint is read:
    mask_token: The mask token (text or id), instead of the one that the tokenizer names.
    tokenizer: Tokenizer files to use instead of the checkpoint's.
    tied: Whether lm_head is the embedding, if config.json and the weights disagree.
    long_context: Longrope: use the frequencies for long texts, and the whole context.
    masks: --no-masks: a model that was not tuned with masks; exact mode with --prompt-lookup. Leaves an MTP
        layer out.
    causal: Read an `sdar` checkpoint as I-DLM's, with causal attention.
    revision: The hub revision to use.
    base: The adapter's base model, instead of the one that it names.
    """

    mask_token: str | None = None
    tokenizer: Annotated[str | None, typer.Option(metavar="DIR")] = None
    tied: Annotated[bool | None, typer.Option("--tied/--untied")] = None
    long_context: bool = False
    masks: bool = True
    causal: bool = False
    revision: str | None = None
    base: str | None = None

    def open(self, source: str | None) -> Checkpoint:
        """Open the checkpoint, or without a source the default one."""
        from .checkpoint.open import open_checkpoint

        if source is None:
            err.print(DEFAULT)
        checkpoint = open_checkpoint(source, **asdict(self))
        vocabulary = checkpoint.vocabulary
        if self.mask_token is not None and vocabulary.named_mask not in (None, vocabulary.mask_token):
            err.print(
                f"mask token: using {vocabulary.mask_token} (id {vocabulary.mask_token_id}) from --mask-token"
                f" instead of the tokenizer's {vocabulary.named_mask}",
                style="yellow",
                markup=False,
            )
        return checkpoint


@contextmanager
def _progress(target: Path) -> Iterator[Any]:
    """Progress bars. After Ctrl-C or SIGTERM, say whether the same command continues."""
    try:
        with progress_bars() as bars:
            yield advance(bars)
    except (KeyboardInterrupt, SystemExit):
        from .export import kept_codes

        if (kept := kept_codes(target)).is_dir():
            err.print(f"stopped; the same command continues with the codes in {kept}", markup=False)
        raise


# A variant whose perplexity is this many times the checkpoint's loses much of it.
MAX_RATIO = 1.25

app = typer.Typer()

Block = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Slots of a decode step: the block that the checkpoint was trained with. By default the one that"
        " it records (I-DLM, examples/finetune), else 8.",
    ),
]


@app.command()
@takes_options
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
    force: Annotated[bool, typer.Option("--force", help="Replace an existing bundle.")] = False,
    as_json: Json = False,
    block: Block = None,
    device: Annotated[
        str, option("Weights", "The device that --precision auto chooses for: cpu or cuda.")
    ] = "cpu",
    *,
    options: ExportOptions,
    checkpoint_options: CheckpointOptions,
) -> None:
    """Export a MARS checkpoint to a bundle for ONNX Runtime."""
    from .export import export_onnx, instead_of_w8a8
    from .option_rules import check_needs, choose_kv, choose_precision
    from .tensorrt.engines import is_bundle

    if checkpoint is not None and is_bundle(checkpoint):
        raise CheckpointError(
            f"{checkpoint}: already a bundle, so there is nothing to export. To run it:"
            f" `mars-export generate {checkpoint} -p ...`; to add an engine: `mars-export trt {checkpoint}`;"
            " for another precision, export its checkpoint again"
        )
    is_auto = options.precision == "auto"
    if is_auto:
        precision, reason = choose_precision(device)
        err.print(f"precision: {precision} ({reason})")
        options = replace(options, precision=precision)
    elif device != "cpu":
        what = "--device: only with --precision auto, which chooses the precision for that device"
        raise ExportError(what, field="device")
    check_needs(options, ExportOptions())
    with _progress(output) as report:
        opened = checkpoint_options.open(checkpoint)
        options = replace(options, block=block or opened.block)
        if is_auto and options.precision == "w8a8" and (other := instead_of_w8a8(opened, options)):
            err.print(f"precision: {other[0]} ({other[1]})")
            options = replace(options, precision=other[0])
        asked = options
        if is_auto and choose_kv(options, opened.dims) != options.kv:
            err.print("KV entries: int8 (a quarter of the memory; --kv float stores the activations' type)")
            options = replace(options, kv="int8")
        _print_quantizer(options, opened)
        try:
            manifest = export_onnx(opened, output, options, force=force, progress=report)
        except PrecisionError as error:
            if not is_auto or options.precision == "w4a8":
                raise
            err.print(f"precision: fp32 ({str(error).partition(';')[0]})", markup=False)
            options = replace(asked, precision="fp32", quantizer="auto", calibration_text=None)
            manifest = export_onnx(opened, output, options, force=force, progress=report)
    if as_json:
        print_json({"bundle": str(output), "manifest": json.loads(manifest.to_json())})
        return
    from ..runtime.bundle.manifest import NOT_BATCH_INVARIANT

    variant, size = manifest.variants[0], sum(f.size for f in manifest.files)
    out.print(
        f"[bold]{output}[/]  {size / 1e6:.0f} MB, {options.precision}, block {options.block},"
        f" {len(manifest.variants)} graph(s)"
    )
    if variant.drift is not None:
        _print_drift(variant.drift, variant.precision)
    if not variant.is_batch_invariant:
        out.print(f"{options.precision}: {NOT_BATCH_INVARIANT}")
    system = "" if checkpoint is not None else " --system 'Reply with tool calls.'"
    if options.precision == "bf16":
        out.print(f"bf16 runs with TensorRT only; next: mars-export trt {output}", markup=False)
    else:
        out.print(f"try: mars-export chat {output}{system}", markup=False)


@app.command()
@takes_options
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
            help="The bundle to write: by default mars.bundle, or the bundle that is given.",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace an existing bundle or engine; build even if memory looks too small."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be built, and build nothing.")
    ] = False,
    as_json: Json = False,
    block: Block = None,
    precision: Annotated[
        str | None,
        option(
            "Weights",
            "Precision of the weights: fp16 (default), bf16, fp32, int8 or int4; a bundle already has one.",
        ),
    ] = None,
    activations: Annotated[
        str, option("Weights", "Type in which quantized weights are computed: fp16, bf16 or fp32.")
    ] = "fp16",
    head: Annotated[
        str, option("Weights", "How a quantized bundle stores lm_head: float, int8 or int4.")
    ] = "float",
    *,
    engine: EngineOptions,
    options: GraphOptions,
    checkpoint_options: CheckpointOptions,
) -> None:
    """Build a TensorRT engine, or write a recipe to build it on the target if this machine cannot."""
    from ..runtime.bundle.open import open_bundle
    from .option_rules import check_needs
    from .tensorrt.engines import add_engine, export_engine, is_bundle

    with _progress(output or Path(source or "mars.bundle")) as report:
        if source is not None and is_bundle(source):
            if (options, checkpoint_options, activations, head) != (
                GraphOptions(), CheckpointOptions(), "fp16", "float",
            ):  # fmt: skip
                raise ExportError(
                    f"{source} is a bundle; options for weights, the graph and the checkpoint need a"
                    " checkpoint instead",
                    field="options",
                )
            written = output or Path(source)
            outcome = add_engine(
                open_bundle(source), written, engine, precision=precision, block=block,
                force=force, dry_run=dry_run, progress=report,
            )  # fmt: skip
        else:
            written = output or Path("mars.bundle")
            opened = checkpoint_options.open(source)
            graph = ExportOptions(**asdict(options) | {
                "block": block or opened.block, "precision": precision or "fp16", "activations": activations,
                "head": head, "embedding": "float",
            })  # fmt: skip
            check_needs(graph, ExportOptions(activations="fp16", head="float", embedding="float"))
            if not dry_run:
                _print_quantizer(graph, opened)
            outcome = export_engine(
                opened, written, graph, engine, force=force, dry_run=dry_run, progress=report
            )
    if as_json:
        print_json({"bundle": str(written)} | outcome.to_dict())
    else:
        _print_engine(written, outcome)


def _print_quantizer(options: ExportOptions, checkpoint: Checkpoint) -> None:
    from .option_rules import quantizer_for

    quantizer = quantizer_for(options, checkpoint)
    if quantizer is not None and quantizer.reason:
        err.print(quantizer.reason, markup=False)


def _print_engine(bundle: Path, outcome: EngineResult) -> None:
    plan, variant = outcome.plan, outcome.variant
    out.print(
        f"[bold]{bundle}[/]  engine {plan.name} for {', '.join(plan.target.compute_capabilities)},"
        f" {plan.backend}, KV layout {' or '.join(plan.kv_layouts)}"
    )
    for r in plan.ranges:
        out.print(
            f"  {r.name}: batch {r.batch}, slots {r.slots}, predictions {r.outputs}, capacity {plan.capacity}"
        )
    if outcome.manifest is None and plan.reason is None:
        out.print(
            f"dry run: nothing was built; a build would need about {outcome.memory / 1e9:.1f} GB of memory"
        )
    elif variant is not None and variant.engine is not None and outcome.manifest is not None:
        info, size = variant.engine, next(f.size for f in outcome.manifest.files if f.path == variant.file)
        out.print(
            f"built: {size / 1e6:.0f} MB with {variant.backend} {info.version} in {info.seconds:.1f} s, with"
            f" at most {info.peak_memory / 1e9:.1f} GB of memory"
        )
        if variant.drift is not None:
            _print_drift(variant.drift, variant.precision)
        out.print(f"try, on that GPU: mars-export chat {bundle} --device cuda")
    else:
        was = "would be" if outcome.manifest is None else "was"
        err.print(f"No engine {was} built: {plan.reason}.", style="yellow")
        if outcome.recipe is not None:
            out.print(
                f"The bundle holds a recipe instead. On the device, run: sh {bundle}/{outcome.recipe}",
                markup=False,
            )


def _print_drift(drift: ParityReport, precision: str) -> None:
    """Print the verdict of the self-check and how the variant reads a page of text. Its figures, with their
    bounds, are printed if it failed; a warning if the page has become much less likely.
    """
    from .check.selfcheck import BOUNDS

    _, confidence_bound, share = BOUNDS[precision]
    positions, matches, error = drift.positions, drift.argmax_matches, drift.max_confidence_error
    failed = matches < share * positions or error > confidence_bound
    reader = f" (as {drift.reference_library} reads it)" if drift.reference_library else ""
    text = drift.text
    sentence = f"{precision} predicts the checkpoint's next token in {matches} of {positions} places{reader}"
    if text is not None:
        sentence = (
            f"on a page of text, {precision} predicts the checkpoint's next token in {text.matches} of"
            f" {text.positions} places; perplexity {text.perplexity:.1f}, the checkpoint's"
            f" {text.checkpoint_perplexity:.1f}{reader}"
        )
    out.print(f"self-check {'failed' if failed else 'passed'}: {sentence}")
    if failed:
        out.print(
            f"  short prompts: {matches} of {positions} next tokens (at least"
            f" {math.ceil(share * positions)}), confidence error {error:.2g} (at most {confidence_bound:g}),"
            f" logit error {drift.max_logit_error:.2g}"
        )
    if failed or (text is not None and text.perplexity > MAX_RATIO * text.checkpoint_perplexity):
        err.print(
            f"warning: {precision} loses much of this checkpoint; compare their answers on your own task"
            " (docs/quantization.md), or choose a wider --precision",
            style="yellow",
        )
