"""The options that an export accepts, and the precision that fits a device."""

from __future__ import annotations

from collections.abc import Iterator

from ..runtime.errors import ExportError
from ..runtime.machine import byte_products
from .checkpoint.dims import Dims
from .checkpoint.open import Checkpoint
from .codes import INTEGER, SCHEMES
from .export_options import MAX_BLOCK, ExportOptions, out_of_range
from .quantize.quantizer import Quantizer, choose_quantizer

MAX_INT8_HEAD = 512  # sums of byte products are exact
MAX_MTP_BLOCK = 4
OF_CODES = "activations", "group", "asymmetric", "head", "embedding", "quantizer", "calibration_text"
OF_FIXED = "batch", "capacity", "prefill"


def choose_precision(device: str = "cpu") -> tuple[str, str]:
    """The precision of `auto` for ONNX Runtime on a CPU or a GPU, and the reason."""
    if device == "cuda":
        return "fp16", "the fastest on a GPU; for a smaller bundle: --precision int4 --calibration-text FILE"
    if device != "cpu":
        raise ExportError(f"unknown device `{device}` (known: cpu, cuda)", field="device")
    return "w8a8", f"the fastest on a CPU, byte products here: {byte_products()}; smaller: --precision w4a8"


def choose_kv(options: ExportOptions, dims: Dims) -> str | None:
    """The type of KV entries beside a precision that `auto` chose, if none was asked for."""
    is_possible = options.kv is None and not any(_problems_of_int8_kv(options, dims))
    return "int8" if is_possible else options.kv


def quantizer_for(options: ExportOptions, checkpoint: Checkpoint) -> Quantizer | None:
    """The quantizer of an export; None if the weights are not quantized."""
    return choose_quantizer(checkpoint, options.quantization, options.quantizer, options.calibration_text)


def check_needs(options: ExportOptions, defaults: ExportOptions) -> None:
    """Raise ExportError for values out of range, and for options that differ from `defaults` and would do
    nothing, with what they need.
    """
    if problems := out_of_range(options):
        raise ExportError("; ".join(problems), field="options")
    given = {name for name in (*OF_CODES, *OF_FIXED) if getattr(options, name) != getattr(defaults, name)}
    without_codes = options.precision not in SCHEMES
    without_groups = options.precision in INTEGER and options.head != "int4"
    needs = {
        f"--precision {', '.join(SCHEMES)}": given & set(OF_CODES) if without_codes else (),
        "--precision int4 or int8, or --head int4": given & {"group"} if without_groups else (),
        "--fixed": () if options.fixed else given & set(OF_FIXED),
    }
    problems = [
        f"{', '.join(f'--{name}'.replace('_', '-') for name in sorted(names))}: only with {need}"
        for need, names in needs.items()
        if names
    ]
    if problems:
        raise ExportError("; ".join(problems), field="options")


def check_options(options: ExportOptions, dims: Dims) -> None:
    """Raise ExportError that lists every option out of range."""
    problems, context_length, net = out_of_range(options), dims.context_length, dims.recurrent
    if options.kv == "int8":
        problems += _problems_of_int8_kv(options, dims)
    if options.quantization is not None:
        inputs = {
            "q, k, v": dims.hidden_size,
            "the attention output": dims.num_heads * dims.head_dim,
            **({} if net is None else {"the recurrent output": net.value_heads * net.value_dim}),
            "down": dims.intermediate_size,
        }
        problems += options.quantization.problems(inputs)
        if options.quantization.is_integer and options.activations != "fp32":
            problems.append(f"--precision {options.precision} is computed with --activations fp32 only")
    if not 1 <= options.block <= min(MAX_BLOCK, context_length // 2):
        problems.append(
            f"--block must be 1 to {min(MAX_BLOCK, context_length // 2)} for this checkpoint, not"
            f" {options.block}"
        )
    if net is not None and (options.dtype != "float32" or options.is_appended or options.fixed):
        problems.append(
            "recurrent layers are computed in fp32, in the KV layout in-place and without fixed shapes: give"
            f" --precision {', '.join(('fp32', *SCHEMES))}"
        )
    if dims.mtp:
        problems += _mtp_problems(options)
    if options.top_k > dims.vocab_size:
        problems.append(f"--top-k must be at most {dims.vocab_size}, not {options.top_k}")
    if options.fixed:
        problems += options.problems(options.block, context_length)
    if problems:
        raise ExportError("; ".join(problems), field="options")


def _problems_of_int8_kv(options: ExportOptions, dims: Dims) -> Iterator[str]:
    if options.precision not in INTEGER:
        yield f"--kv int8 is for --precision {' and '.join(INTEGER)}, not {options.precision}"
    if options.is_appended or options.fixed:
        yield "--kv int8 needs --kv-layout in-place and excludes --fixed"
    if dims.quirks.attention_cap:
        yield "--kv int8 does not support capped attention scores, which this checkpoint has"
    if dims.head_dim % 4 or dims.head_dim > MAX_INT8_HEAD:
        yield f"--kv int8 needs heads of a multiple of 4, at most {MAX_INT8_HEAD}, not {dims.head_dim}"


def _mtp_problems(options: ExportOptions) -> list[str]:
    """Problems of the options with an MTP layer."""
    problems = []
    if not 2 <= options.block <= MAX_MTP_BLOCK:
        problems.append(
            f"--block must be 2 to {MAX_MTP_BLOCK} for a checkpoint with an MTP layer, one more than the"
            f" draft tokens of a step, not {options.block}"
        )
    if options.is_appended or options.fixed or options.dtype == "bfloat16":
        problems.append("an MTP layer needs the KV layout in-place and a graph without fixed shapes or bf16")
    return problems
