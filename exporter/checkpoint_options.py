"""The options of `onnx` and `trt` that say how a checkpoint is read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ..runtime.terminal.console import err

if TYPE_CHECKING:
    from .checkpoint.open import Checkpoint

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
    causal: An `sdar` checkpoint is I-DLM's, with causal attention.
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
