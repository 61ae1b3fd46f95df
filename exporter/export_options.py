"""The options of an export. `mars-export onnx` and `trt` show them as they stand here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from .codes import Quantization

FLOATS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
AtLeastOne = typer.Option(min=1)


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """How weights are stored, what the graph returns, and how it is checked.

    block: Slots of a decode step: the block the checkpoint was tuned with.

    Weights:
    precision: Of the weights: fp32, fp16, bf16 (for TensorRT), int8, int4, w8a8 (activations too), or auto.
    activations: What quantized weights are computed in: fp32, fp16 or bf16.
    group: int4 and int8: group size, the number of inputs that share a scale.
    asymmetric: int4 and int8: store zero points.
    head: How a quantized bundle stores lm_head: float, int8 or int4.
    embedding: How a quantized bundle stores the embedding: float or int8.
    quantizer: How codes are chosen: gptq (from a calibration text), round, or auto: gptq for w8a8, and for
        int4 if there is a text.
    calibration_text: Rows of your task (.jsonl) or plain text (.txt) for gptq; w8a8 has a built-in text, and
        the default checkpoint its own.

    Outputs of the graph:
    metrics: Also return margin and entropy.
    logits: Return logits too: sampling, repetition penalty and structured answers need them. Without them a
        step is 1 to 2 % faster.
    top_k: Return the K most likely tokens too: structured answers without logits need them; 16 is plenty.

    Shapes:
    kv: Type of KV entries: float (that of activations), or int8, of w8a8 on a CPU only: a quarter of the
        memory.
    kv_layout: in-place, or appended: plain operators for TensorRT before 10.15.
    fixed: Also write graphs with fixed shapes, which share the weights.
    batch: Rows of the --fixed graphs.
    capacity: KV entries of a row in the --fixed graphs.
    prefill: Slots of the --fixed prefill graph.

    Checks:
    allow_drift: Keep a bundle that fails the self-check.
    reference: Whether to compare the checkpoint with transformers and peft.
    accuracy_level: Of int4 and int8 products in ONNX Runtime, 0 exact to 4 fast.
    """

    block: int = 8
    precision: str = "fp32"
    activations: str = "fp32"
    group: int = 32
    asymmetric: bool = False
    head: str = "int8"
    embedding: str = "int8"
    quantizer: str = "auto"
    calibration_text: Annotated[Path | None, typer.Option(metavar="FILE")] = None
    metrics: bool = False
    logits: bool = True
    top_k: Annotated[int, typer.Option(min=0, metavar="K")] = 0
    kv: str = "float"
    kv_layout: str = "in-place"
    fixed: bool = False
    batch: Annotated[int, AtLeastOne] = 1
    capacity: Annotated[int, AtLeastOne] = 1024
    prefill: Annotated[int, AtLeastOne] = 128
    allow_drift: bool = False
    reference: bool = True
    accuracy_level: int = 4

    @property
    def dtype(self) -> str:
        """The type of activations, and of KV entries in floating point."""
        return FLOATS[self.activations if self.quantization else self.precision]

    @property
    def kv_dtype(self) -> str:
        return "int8" if self.kv == "int8" else self.dtype

    @property
    def quantization(self) -> Quantization | None:
        from .codes import SCHEMES, Quantization

        if self.precision not in SCHEMES:
            return None
        return Quantization(self.precision, self.group, not self.asymmetric, self.head, self.embedding)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the graph's outputs but the KV entries."""
        return (
            *("token_ids", "confidence"),
            *(("margin", "entropy") if self.metrics else ()),
            *(("topk_ids", "topk_logprobs") if self.top_k else ()),
            *(("logits",) if self.logits else ()),
        )

    @property
    def weight_precision(self) -> str:
        return self.precision if self.quantization else self.dtype
