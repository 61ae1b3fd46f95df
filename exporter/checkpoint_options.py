"""The options of `onnx` and `trt` that say how a checkpoint is read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..runtime.errors import CheckpointError
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
    draft_adapter: A draft adapter, which acts at draft slots only: the text is CHECKPOINT's. Repeatable, for
        requests to choose.
    draft_ids: What draft slots feed, as in the adapter's training: mask or noise.
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
