"""The options of an export, and the precision that fits a device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..runtime.bundle.manifest import KV_LAYOUTS
from ..runtime.device.ort.backend import FASTEST_LEVEL
from ..runtime.errors import ExportError
from ..runtime.machine import byte_products
from .checkpoint.architecture.dims import Dims
from .checkpoint.open import Checkpoint
from .codes import SCHEMES, Quantization
from .quantize.quantizer import Quantizer, choose_quantizer

FLOATS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
PRECISIONS = (*FLOATS, *SCHEMES)
MAX_BLOCK, MAX_TOP_K = 64, 256

SMALLER = "for a smaller bundle: --precision int4 --calibration-text FILE"


def choose_precision(device: str = "cpu") -> tuple[str, str]:
    """What `--precision auto` means for ONNX Runtime on a CPU or a GPU, and the reason."""
    if device == "cuda":
        return "fp16", f"the fastest on a GPU; {SMALLER}"
    if device != "cpu":
        raise ExportError(f"unknown device `{device}` (known: cpu, cuda)")
    return "w8a8", f"the fastest on a CPU, byte products here: {byte_products()}; {SMALLER}"


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The options of an export, as `mars-export onnx` has them."""

    block: int = 8  # slots of a decode step
    precision: str = "fp32"  # of the weights
    activations: str = "fp32"  # what quantized weights are computed in
    # The next four are those of Quantization.
    group: int = 32
    asymmetric: bool = False
    head: str = "int8"
    embedding: str = "int8"
    metrics: bool = False  # also return margin and entropy
    logits: bool = True  # also return logits
    top_k: int = 0  # also return this many of the most likely tokens
    fixed: bool = False  # also write graphs with fixed shapes: `batch` rows, `capacity` KV entries
    batch: int = 1
    capacity: int = 1024
    prefill: int = 128  # slots of the prefill graph with fixed shapes
    allow_drift: bool = False  # keep a bundle that fails the self-check
    reference_library: bool = True  # compare the checkpoint with transformers
    kv_layout: str = "in-place"
    accuracy_level: int = FASTEST_LEVEL  # of int4 and int8 products in ONNX Runtime
    quantizer: str = "auto"  # gptq, round or auto
    calibration_text: Path | None = None  # what gptq reads

    @property
    def dtype(self) -> str:
        """The type of activations and KV entries."""
        return FLOATS[self.activations if self.quantization else self.precision]

    @property
    def quantization(self) -> Quantization | None:
        if self.precision not in SCHEMES:
            return None
        return Quantization(self.precision, self.group, not self.asymmetric, self.head, self.embedding)

    def quantizer_for(self, checkpoint: Checkpoint) -> Quantizer | None:
        """What chooses the codes; None if the weights are not quantized."""
        return choose_quantizer(checkpoint, self.quantization, self.quantizer, self.calibration_text)

    def check(self, dims: Dims) -> None:
        """Raise ExportError that lists every option out of range."""
        problems, context_length = [], dims.context_length
        if self.precision not in PRECISIONS:
            problems.append(f"--precision must be one of {', '.join(PRECISIONS)}, not {self.precision}")
        if self.kv_layout not in KV_LAYOUTS:
            problems.append(f"--kv-layout must be one of {', '.join(KV_LAYOUTS)}, not {self.kv_layout}")
        if self.quantization is not None:
            inputs = {
                "q, k, v": dims.hidden_size,
                "the attention output": dims.num_heads * dims.head_dim,
                "down": dims.intermediate_size,
            }
            problems += self.quantization.problems(inputs)
            if self.activations not in FLOATS:
                problems.append(f"--activations must be one of {', '.join(FLOATS)}, not {self.activations}")
            if self.precision == "w8a8" and self.activations != "fp32":
                problems.append("--precision w8a8 is computed with --activations fp32 only")
        if not 1 <= self.block <= min(MAX_BLOCK, context_length // 2):
            problems.append(
                f"--block must be 1 to {min(MAX_BLOCK, context_length // 2)} for this checkpoint, not"
                f" {self.block}"
            )
        if not 0 <= self.top_k <= min(MAX_TOP_K, dims.vocab_size):
            problems.append(f"--top-k must be 0 to {min(MAX_TOP_K, dims.vocab_size)}, not {self.top_k}")
        if self.fixed:
            if not self.block <= self.capacity <= context_length:
                problems.append(
                    f"--capacity must be {self.block} to {context_length} (the checkpoint's context), not"
                    f" {self.capacity}"
                )
            if not 1 <= self.prefill <= self.capacity:
                problems.append(f"--prefill must be 1 to the capacity, not {self.prefill}")
            if self.batch < 1:
                problems.append(f"--batch must be 1 or more, not {self.batch}")
        if problems:
            raise ExportError("; ".join(problems))
