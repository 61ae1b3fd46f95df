"""Options that `onnx` and `trt` share, as dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..runtime.errors import CheckpointError
from ..runtime.terminal.console import err
from ..runtime.terminal.options import option

if TYPE_CHECKING:
    from .checkpoint.open import Checkpoint
    from .export_options import ExportOptions

DEFAULT = "No CHECKPOINT given: using the default one (SmolLM2-135M-Instruct with the embedded MARS adapter)."
# Panels of --help
WEIGHTS = "Weights"
OUTPUTS = "Outputs of the graph"
READING = "How the checkpoint is read"
CHECKS = "Checks"


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """How a checkpoint is read."""

    mask_token: Annotated[
        str | None,
        option(READING, "The mask token (text or id), instead of the one that the tokenizer names."),
    ] = None
    tokenizer: Annotated[
        str | None, option(READING, "Tokenizer files to use instead of the checkpoint's.", metavar="DIR")
    ] = None
    tied: Annotated[
        bool | None,
        option(
            READING,
            "Whether lm_head is the embedding, if config.json and the weights disagree.",
            "--tied/--untied",
        ),
    ] = None
    long_context: Annotated[
        bool,
        option(
            READING, "Longrope: use the frequencies for long texts, and the whole context.", "--long-context"
        ),
    ] = False
    draft_adapter: Annotated[
        list[str] | None,
        option(
            READING,
            "A draft adapter, which acts at draft slots only: the text is CHECKPOINT's. Repeatable, for"
            " requests to choose.",
            "--draft-adapter",
            metavar="[NAME=]DIR",
        ),
    ] = None
    draft_ids: Annotated[
        str, option(READING, "What draft slots feed, as in the adapter's training: mask or noise.")
    ] = "mask"
    masks: Annotated[
        bool,
        option(
            READING,
            "--no-masks: a model that was not tuned with masks; exact mode with --lookup.",
            "--masks/--no-masks",
        ),
    ] = True
    causal: Annotated[
        bool, option(READING, "An `sdar` checkpoint is I-DLM's, with causal attention.", "--causal")
    ] = False
    revision: Annotated[str | None, option(READING, "The hub revision to use.")] = None
    base: Annotated[
        str | None, option(READING, "The adapter's base model, instead of the one that it names.")
    ] = None

    def open(self, source: str | None) -> Checkpoint:
        """Open the checkpoint, or without a source the default one."""
        from .checkpoint.open import open_checkpoint

        if source is None:
            err.print(DEFAULT)
        checkpoint = open_checkpoint(
            source, revision=self.revision, base=self.base, mask_token=self.mask_token, tied=self.tied,
            tokenizer=self.tokenizer, long_context=self.long_context, masks=self.masks, causal=self.causal,
            draft_adapters=_named(self.draft_adapter or []), draft_ids=self.draft_ids,
        )  # fmt: skip
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
    """How weights are stored, what the graph returns, and how it is checked."""

    group: Annotated[
        int, option(WEIGHTS, "int4 and int8: group size, the number of inputs that share a scale.")
    ] = 32
    quantizer: Annotated[
        str,
        option(
            WEIGHTS,
            "How codes are chosen: gptq (needs a calibration text), round, or auto: gptq for int4 if"
            " there is a text.",
        ),
    ] = "auto"
    calibration_text: Annotated[
        Path | None,
        option(
            WEIGHTS,
            "Rows of your task (.jsonl) or plain text (.txt) for gptq; the default checkpoint has its own.",
            metavar="FILE",
        ),
    ] = None
    metrics: Annotated[bool, option(OUTPUTS, "Also return margin and entropy.", "--metrics")] = False
    logits: Annotated[
        bool,
        option(
            OUTPUTS,
            "Return logits too: sampling, repetition penalty and structured answers need them. Without them a"
            " step is 1 to 2 % faster.",
            "--logits/--no-logits",
        ),
    ] = True
    top_k: Annotated[
        int,
        option(
            OUTPUTS,
            "Return the K most likely tokens too: structured answers without logits need them; 16 is plenty.",
            min=0,
            metavar="K",
        ),
    ] = 0
    allow_drift: Annotated[
        bool, option(CHECKS, "Keep a bundle that fails the self-check.", "--allow-drift")
    ] = False
    no_oracle: Annotated[
        bool, option(CHECKS, "Do not compare the checkpoint with transformers and peft.", "--no-oracle")
    ] = False

    def with_options(self, **options: Any) -> ExportOptions:
        """These and the command's own as the options of an export."""
        from .export_options import ExportOptions

        return ExportOptions(
            group=self.group, quantizer=self.quantizer,
            calibration_text=self.calibration_text, metrics=self.metrics, logits=self.logits,
            top_k=self.top_k, allow_drift=self.allow_drift, oracle=not self.no_oracle, **options,
        )  # fmt: skip
