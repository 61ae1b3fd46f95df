"""The options of exports and engines. `mars-export onnx` and `trt` take their options from here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..runtime.rules import broken, integer, one_of

if TYPE_CHECKING:
    from .codes import Quantization

FLOATS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
PRECISIONS = (*FLOATS, "int4", "int8", "w8a8", "w4a8")
TABLES = ("float", "int8", "int4")  # how lm_head may be stored; the embedding may be float or int8
AtLeastOne = typer.Option(min=1)
DEFAULT_CAPACITY, DEFAULT_PREFILL, MAX_ROWS, MAX_BLOCK, MAX_TOP_K = 1024, 128, 1024, 64, 256


def out_of_range(options: object) -> list[str]:
    """Problems of the options' values that do not depend on the checkpoint."""
    wrong = broken(options).items()
    return [f"--{name.replace('_', '-')}{text.removeprefix(name)}" for name, text in wrong]


@dataclass(frozen=True)
class Shapes:
    """The shapes of graphs and engines.

    Shapes:
    kv_layout: in-place, or appended: plain operators for TensorRT before 10.15. By default in-place, for an
        engine what the target's TensorRT supports; a Jetson's recipe has both.
    fixed: onnx: also write graphs with fixed shapes, which share the weights. trt: an engine for exactly
        --batch rows of --block slots.
    batch: Rows of the --fixed graphs; of an engine, the maximum batch size.
    capacity: KV entries of a row, in the --fixed graphs or the engine: 1024, or the model's context if that
        is less.
    prefill: Slots of the --fixed prefill graph, or maximum of an engine's prefill step: 128 by default.
    """

    kv_layout: Annotated[str | None, one_of(("in-place", "appended"))] = None
    fixed: bool = False
    batch: Annotated[int, integer(1, high=MAX_ROWS)] = 1
    capacity: Annotated[int | None, AtLeastOne] = None
    prefill: Annotated[int | None, AtLeastOne] = None

    def sizes(self, context_length: int) -> tuple[int, int]:
        """KV entries of a row, and slots of a prefill step."""
        capacity = min(DEFAULT_CAPACITY, context_length) if self.capacity is None else self.capacity
        return capacity, min(DEFAULT_PREFILL, capacity) if self.prefill is None else self.prefill

    def problems(self, min_capacity: int, context_length: int) -> list[str]:
        """Problems of the sizes. `min_capacity`: the fewest KV entries of a row."""
        problems, (capacity, prefill) = [], self.sizes(context_length)
        if not min_capacity <= capacity <= context_length:
            problems.append(
                f"--capacity must be {min_capacity} to {context_length} (the checkpoint's context), not"
                f" {capacity}"
            )
        if not 1 <= prefill <= capacity:
            problems.append(f"--prefill must be 1 to the capacity, not {prefill}")
        return problems


@dataclass(frozen=True)
class EngineOptions(Shapes):
    """How an engine is built.

    Engine:
    target: rtx, sm75 ... sm121, portable (any GPU that TensorRT-RTX accepts), host, jetson-orin,
        jetson-thor, h100 or h200.
    tf32: Round float32 products to TF32: faster, but less exact.
    workspace: GPU memory that a layer may use for itself, such as 512M or 4G; by default 1G if the GPU uses
        the system's memory, else TensorRT's, which is most of it.
    build: Build the engine if this machine can, or only write the graph and a recipe.
    """

    target: str = "rtx"
    tf32: bool = False
    workspace: Annotated[int | None, integer(1 << 20, "at least 1M", metavar="SIZE")] = None
    build: bool = True


@dataclass(frozen=True)
class GraphOptions:
    """How weights are stored, what the graph returns, and how it is checked.

    block: Slots of a decode step: the block that the checkpoint was trained with.

    Weights:
    precision: Precision of the weights: fp32, fp16, bf16 (for TensorRT), int8, int4, w8a8 or w4a8 (8-bit
        activations), or auto.
    activations: Type in which quantized weights are computed: fp32, fp16 or bf16.
    group: int4 and int8: group size, the number of inputs that share a scale.
    head: How a quantized bundle stores lm_head: float, int8 or int4.
    quantizer: How codes are chosen: gptq (from a calibration text), round, or auto: gptq for w8a8 and
        w4a8, and for int4 if there is a text.
    calibration_text: Rows of your task (.jsonl) or plain text (.txt) for gptq; w8a8 and w4a8 have a
        built-in text, and the default checkpoint its own.

    Outputs of the graph:
    metrics: Also return margin and entropy.
    logits: Return logits too: sampling, repetition penalty and structured answers need them. Without them a
        step is 1 to 2 % faster.
    top_k: Return the K most likely tokens too: structured answers without logits need them; 16 is plenty.

    Checks:
    allow_drift: Keep a bundle that fails the self-check.
    reference: Whether to compare the checkpoint with transformers and peft.
    """

    block: int = 8
    precision: Annotated[str, one_of(PRECISIONS)] = "fp32"
    activations: Annotated[str, one_of(FLOATS)] = "fp32"
    group: int = 32
    head: Annotated[str, one_of(TABLES)] = "int8"
    quantizer: str = "auto"
    calibration_text: Annotated[Path | None, typer.Option(metavar="FILE")] = None
    metrics: bool = False
    logits: bool = True
    top_k: Annotated[int, integer(0, high=MAX_TOP_K, metavar="K")] = 0
    allow_drift: bool = False
    reference: bool = True


@dataclass(frozen=True)
class ExportOptions(Shapes, GraphOptions):
    """All options of an export.

    Weights:
    asymmetric: int4 and int8: store zero points.
    embedding: How a quantized bundle stores the embedding: float or int8.
    shortlist: Tokens that an MTP layer may propose, the most frequent ones. Fewer are faster.

    Shapes:
    kv: Type of KV entries: float (that of activations), or int8, of w8a8 and w4a8 only: a quarter of the
        memory. By default int8 where --precision auto chooses one of them and the model allows it.

    Python only:
    accuracy_level: Accuracy of int4 and int8 products in ONNX Runtime: 0 is exact, 4 is fast.
    """

    asymmetric: bool = False
    embedding: Annotated[str, one_of(TABLES[:2])] = "int8"
    shortlist: Annotated[int, integer(1)] = 32_768
    kv: Annotated[str | None, one_of(TABLES[:2])] = None
    accuracy_level: int = 4

    @property
    def is_appended(self) -> bool:
        """Whether the KV layout is `appended`."""
        return self.kv_layout == "appended"

    @property
    def is_cuda(self) -> bool:
        """Whether the KV layout is `cuda`: that of a graph that is written beside the `in-place` one."""
        return self.kv_layout == "cuda"

    @property
    def dtype(self) -> str:
        """The type of activations, and of KV entries in floating point. CUDA multiplies codes in fp16."""
        if self.quantization is None:
            return FLOATS[self.precision]
        return FLOATS["fp16" if self.is_cuda else self.activations]

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
