"""The options of `onnx` and `trt`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..runtime.errors import CheckpointError
from ..runtime.terminal.console import err
from ..runtime.terminal.options import MostBytes

if TYPE_CHECKING:
    from .checkpoint.open import Checkpoint

DEFAULT = "No CHECKPOINT given: using the default one (SmolLM2-135M-Instruct with the embedded MARS adapter)."
AtLeastOne = typer.Option(min=1)


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """How a checkpoint is read.

    How the checkpoint is read:
    mask_token: The mask token (text or id), instead of the one that the tokenizer names.
    tokenizer: Tokenizer files to use instead of the checkpoint's.
    tied: Whether lm_head is the embedding, if config.json and the weights disagree.
    long_context: Longrope: use the frequencies for long texts, and the whole context.
    draft_adapter: A draft adapter, which acts at draft slots only: the text is CHECKPOINT's. Repeatable, for
        requests to choose.
    draft_ids: What draft slots feed, as in the adapter's training: mask or noise.
    masks: --no-masks: a model that was not tuned with masks; exact mode with --prompt-lookup.
    causal: An `sdar` checkpoint is I-DLM's, with causal attention.
    revision: The hub revision to use.
    base: The adapter's base model, instead of the one that it names.
    """

    mask_token: str | None = None
    tokenizer: Annotated[str | None, typer.Option(metavar="DIR")] = None
    tied: Annotated[bool | None, typer.Option("--tied/--untied")] = None
    long_context: bool = False
    draft_adapter: Annotated[list[str] | None, typer.Option(metavar="[NAME=]DIR")] = None
    draft_ids: str = "mask"
    masks: bool = True
    causal: bool = False
    revision: str | None = None
    base: str | None = None

    def open(self, source: str | None) -> Checkpoint:
        """Open the checkpoint, or without a source the default one."""
        from .checkpoint.open import open_checkpoint

        if source is None:
            err.print(DEFAULT)
        options = asdict(self)
        drafts = _named(options.pop("draft_adapter") or [])
        checkpoint = open_checkpoint(source, draft_adapters=drafts, **options)
        vocabulary = checkpoint.vocabulary
        if self.mask_token is not None and vocabulary.named_mask not in (None, vocabulary.mask_token):
            err.print(
                f"mask token: using {vocabulary.mask_token} (id {vocabulary.mask_token_id}) from --mask-token"
                f" instead of the tokenizer's {vocabulary.named_mask}",
                style="yellow",
                markup=False,
            )
        return checkpoint


def _named(adapters: list[str]) -> dict[str, str]:
    """The locations of --draft-adapter by their names: the given ones, or the last part of the path."""
    from ..runtime.bundle.manifest import NAME

    named: dict[str, str] = {}
    for given in adapters:
        name, has_name, location = given.partition("=")
        if not has_name:
            name, location = Path(given).name or given, given
        if NAME.fullmatch(name) is None or name in named or not location:
            raise CheckpointError(
                f"--draft-adapter {given}: each needs its own name of letters, digits, dots, dashes and"
                " underscores: --draft-adapter NAME=DIR"
            )
        named[name] = location
    return named


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """How weights are stored, what the graph returns, and how it is checked: fields of ExportOptions.

    Weights:
    group: int4 and int8: group size, the number of inputs that share a scale.
    quantizer: How codes are chosen: gptq (needs a calibration text), round, or auto: gptq for int4 if there
        is a text.
    calibration_text: Rows of your task (.jsonl) or plain text (.txt) for gptq; the default checkpoint has
        its own.

    Outputs of the graph:
    metrics: Also return margin and entropy.
    logits: Return logits too: sampling, repetition penalty and structured answers need them. Without them a
        step is 1 to 2 % faster.
    top_k: Return the K most likely tokens too: structured answers without logits need them; 16 is plenty.

    Checks:
    allow_drift: Keep a bundle that fails the self-check.
    oracle: Whether to compare the checkpoint with transformers and peft.
    """

    group: int = 32
    quantizer: str = "auto"
    calibration_text: Annotated[Path | None, typer.Option(metavar="FILE")] = None
    metrics: bool = False
    logits: bool = True
    top_k: Annotated[int, typer.Option(min=0, metavar="K")] = 0
    allow_drift: bool = False
    oracle: bool = True


@dataclass(frozen=True, slots=True)
class OnnxOptions:
    """The graph for ONNX Runtime: fields of ExportOptions.

    Weights:
    activations: What quantized weights are computed in: fp32, fp16 or bf16.
    asymmetric: int4 and int8: store zero points.
    head: How a quantized bundle stores lm_head: float, int8 or int4.
    embedding: How a quantized bundle stores the embedding: float or int8.

    Shapes:
    kv_layout: in-place, or appended: plain operators for TensorRT before 10.15.
    fixed: Also write graphs with fixed shapes, which share the weights.
    batch: Rows of the --fixed graphs.
    capacity: KV entries of a row in the --fixed graphs.
    prefill: Slots of the --fixed prefill graph.
    """

    activations: str = "fp32"
    asymmetric: bool = False
    head: str = "int8"
    embedding: str = "int8"
    kv_layout: str = "in-place"
    fixed: bool = False
    batch: Annotated[int, AtLeastOne] = 1
    capacity: Annotated[int, AtLeastOne] = 1024
    prefill: Annotated[int, AtLeastOne] = 128


@dataclass(frozen=True, slots=True)
class OnnxPrecision:
    """The precision of a bundle for ONNX Runtime.

    block: Slots of a decode step: the block the checkpoint was tuned with; by default that of config.json
        (I-DLM), else 8.

    Weights:
    precision: Of the weights: fp32, fp16, bf16 (for TensorRT), int8, int4, w8a8 (activations too), or auto.
    device: The device that --precision auto chooses for: cpu or cuda.
    """

    block: Annotated[int | None, AtLeastOne] = None
    precision: str = "fp32"
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class EnginePrecision:
    """The precision of an engine.

    block: Slots of a decode step; by default as for `onnx`, or the bundle's.

    Weights:
    precision: Of the weights: fp16 (default), bf16, fp32, int8 or int4; a bundle already has its own.
    activations: What quantized weights are computed in: fp16, bf16 or fp32.
    head: How a quantized bundle stores lm_head: float, int8 or int4.
    """

    block: Annotated[int | None, AtLeastOne] = None
    precision: str | None = None
    activations: str = "fp16"
    head: str = "float"


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """How an engine is built: the fields of EngineOptions.

    Engine:
    target: rtx, sm75 ... sm121, host, jetson-orin, jetson-thor, h100 or h200.
    kv_layout: in-place or appended; by default what the target's TensorRT supports.
    tf32: Round float32 products to TF32: faster, but less exact.
    workspace: GPU memory that a layer may use for itself, such as 512M or 4G; TensorRT's default is most of
        it.
    build: Build the engine if this machine can, or only write the graph and a recipe.

    Shapes:
    batch: Maximum batch size.
    capacity: KV entries of a row: 1024, or the model's context if that is less.
    prefill: Most slots of a prefill step: 128 by default.
    fixed: An engine for exactly --batch rows of --block slots.
    """

    target: str = "rtx"
    kv_layout: str | None = None
    tf32: bool = False
    workspace: MostBytes = None
    build: bool = True
    batch: Annotated[int, AtLeastOne] = 1
    capacity: Annotated[int | None, AtLeastOne] = None
    prefill: Annotated[int | None, AtLeastOne] = None
    fixed: bool = False
