"""Chooses the quantizer of an export, and says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ...runtime.bundle.variant_info import QuantizerInfo
from ...runtime.errors import ExportError
from ..checkpoint import default
from ..checkpoint.open import Checkpoint
from ..codes import SCHEMES, Quantization
from .text import built_in_text, read_text

QUANTIZERS = ("auto", "gptq", "round")
HOW = (
    "give rows of your task to --calibration-text FILE.jsonl (or any text as FILE.txt): docs/quantization.md"
)


@dataclass(frozen=True, slots=True)
class Quantizer:
    """`name`: gptq or round. `text` is what gptq reads, None: a built-in text. `reason` is a line for the
    user, which may be empty.
    """

    name: str
    text: Path | None = None
    reason: str = ""

    def prepared(
        self,
        checkpoint: Checkpoint,
        storage: Quantization,
        block: int,
        report: Callable[[str, int, int], None],
        kept: Path | None = None,
    ) -> tuple[Checkpoint, QuantizerInfo]:
        """The checkpoint as it is stored, rotated for integer products and with the codes that this quantizer
        chooses, and its entry for the manifest. `report` is called with what is done, the number of layers
        that are, and of all layers. `kept`: where codes are kept for an export that is interrupted.
        """
        if self.name != "gptq" and not storage.is_integer:
            return checkpoint, QuantizerInfo(self.name)
        text = read_text(self.text, checkpoint, block) if self.text else built_in_text(checkpoint, block)
        if storage.is_integer:
            from .rotate import rotated_checkpoint

            layers = checkpoint.dims.num_layers
            checkpoint = rotated_checkpoint(
                checkpoint, text.sequences, lambda done: report("activations", done, layers)
            )
        if self.name != "gptq":
            return checkpoint, QuantizerInfo(self.name)
        from .calibrated import CalibratedTensors

        layers = checkpoint.dims.num_layers
        tensors = CalibratedTensors(
            checkpoint.tensors,
            checkpoint.dims,
            storage,
            text.sequences,
            lambda done: report("codes", done, layers),
            kept,
        )
        info = QuantizerInfo(self.name, text.sha256, len(text.sequences), text.num_tokens)
        return replace(checkpoint, tensors=tensors), info


def choose_quantizer(
    checkpoint: Checkpoint, storage: Quantization | None, name: str = "auto", text: Path | None = None
) -> Quantizer | None:
    """The quantizer for `storage`; None if that is None. "auto" is gptq if `text` is given, for integer
    products, and for int4 if the checkpoint has a text of its own, as the default one does; else round.

    Raises ExportError for options that do not fit together.
    """
    if name not in QUANTIZERS:
        what = f"--quantizer must be one of {', '.join(QUANTIZERS)}, not {name}"
        raise ExportError(what, field="quantizer")
    if storage is None:
        if name != "auto" or text is not None:
            what = f"--quantizer and --calibration-text are for --precision {', '.join(SCHEMES)}"
            raise ExportError(what, field="quantizer")
        return None
    if name == "round":
        if text is not None:
            what = "--quantizer round reads no text; leave out --calibration-text or --quantizer"
            raise ExportError(what, field="quantizer")
        return Quantizer("round")
    is_default = checkpoint.source == default.NAME and not storage.is_integer
    if text is None and is_default and (name == "gptq" or storage.scheme == "int4"):
        rows = default.calibration_text()
        return Quantizer("gptq", rows, "codes: gptq, on rows of the default checkpoint's tasks")
    if text is not None:
        return Quantizer("gptq", text, f"codes: gptq, on {text}")
    if storage.is_integer:
        return Quantizer("gptq", None, "codes: gptq, on a built-in text (faster: --quantizer round)")
    if name == "gptq":
        raise ExportError(
            f"--quantizer gptq needs a text to calibrate with: {HOW}; or choose --quantizer round",
            field="quantizer",
        )
    if storage.scheme == "int4":
        return Quantizer(
            "round",
            None,
            f"codes: rounded, which costs int4 much of its accuracy; for calibrated codes {HOW}",
        )
    return Quantizer("round")
