"""The check at the end of every export: compares the graph with a plain torch forward of the checkpoint, on
short prompts and on a page of text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

from ...runtime.bundle.manifest import ParityReport, TextDrift
from ...runtime.errors import ExportError, PrecisionError
from ..checkpoint.open import Checkpoint
from ..graph.spec import GraphSpec
from ..graph.step import NEVER
from . import reference, reference_library, segments
from .segments import widened

PARAGRAPH_TOKENS = 64  # at most, of each paragraph
PARAGRAPHS = Path(__file__).with_name("page.txt").read_text(encoding="utf-8").splitlines()
MAX_LOSS = 60.0  # nats per token; a perplexity stays a finite number


def compare_text(
    results: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    paragraphs: Sequence[Sequence[int]],
    mask: int | None,
) -> TextDrift | None:
    """The graph's logits [tokens, vocab] beside the checkpoint's, in which the mask is never predicted; None
    if no paragraph has three tokens.

    The prediction at a paragraph's first token is left out, as by the self-check for rounded weights.
    """
    positions = matches = 0
    losses = [0.0, 0.0]
    for found, exact, ids in zip(results, expected, paragraphs, strict=True):
        following = np.array(ids[2:], np.int64)
        found, exact = found[1:-1], exact[1:-1].copy()
        if mask is not None:
            exact[:, mask] = NEVER
        positions += len(following)
        matches += int((found.argmax(-1) == exact.argmax(-1)).sum())
        losses = [
            total + _loss(logits, following) for total, logits in zip(losses, (found, exact), strict=True)
        ]
    if not positions:
        return None
    perplexities = (math.exp(min(total / positions, MAX_LOSS)) for total in losses)
    return TextDrift(positions, matches, *perplexities)


def _loss(logits: np.ndarray, following: np.ndarray) -> float:
    """The negative log-likelihood of the tokens that follow, in nats."""
    largest = logits.max(-1)
    totals = largest + np.log(np.exp(logits - largest[:, None]).sum(-1))
    return float((totals - np.take_along_axis(logits, following[:, None], 1)[:, 0]).sum())


PROMPTS = (
    "The capital of France is Paris. The capital of Italy is",
    '[{"name": "set_light", "arguments": {"room": "kitchen", "brightness": 40}}]',
    "Tom has 12 apples. He buys 5 more and gives 4 away. 12 + 5 = 17. 17 - 4 =",
    "def add(a, b):\n    return a + b\n",
)
PROMPT_TOKENS = 24  # at most, of each prompt
OUTPUTS = ("token_ids", "confidence", "logits")
# The bounds by the graph's precision: (largest logit error, largest confidence error, smallest share of
# argmax matches). Logit errors are relative to the largest logit, or to 1 if all are smaller.
BOUNDS = {
    "float32": (5e-4, 1e-3, 0.99),
    "float16": (0.025, 0.05, 0.9),
    "bfloat16": (0.2, 0.4, 0.8),
    "w8a8": (0.4, 0.8, 0.75),
    "int8": (0.4, 0.8, 0.75),
    "w4a8": (0.8, 1.0, 0.5),
    "int4": (0.8, 1.0, 0.5),
}
REMEDIES = {
    "w4a8": "Use --precision w8a8",
    "int4": "Use --precision int8 (or, with `onnx`, w8a8, or --asymmetric)",
    "float32": "The weights may be too large for exact products: report the model",
}


def check(
    directory: Path,
    graph: onnx.ModelProto,
    checkpoint: Checkpoint,
    spec: GraphSpec,
    accuracy_level: int,
    *,
    bounded: bool = True,
    with_reference_library: bool = True,
    progress: Callable[[int], None] | None = None,
) -> ParityReport:
    """Run `graph` (that of `spec` with logits, weights in `directory`) on a few prompts followed by masks,
    and on a page of text.

    Raises ExportError for NaN or Inf in the checkpoint's logits, or if transformers reads the checkpoint in
    another way; PrecisionError for NaN or Inf in the graph's logits, or, with `bounded`, for a drift beyond
    the bounds of the precision. `progress` is called with numbers of layers, in all twice those of the model.
    """
    mask = checkpoint.vocabulary.mask_token_id
    masks = [] if mask is None else [mask] * (spec.options.block - 1)
    prompts = _token_ids(checkpoint, PROMPTS, PROMPT_TOKENS, spec.options.block)
    prompts = prompts or [[checkpoint.vocabulary.eos_token_ids[0]]]
    paragraphs = _token_ids(checkpoint, PARAGRAPHS, PARAGRAPH_TOKENS, spec.options.block)
    sequences = [*(ids + masks for ids in prompts), *paragraphs]
    expected = reference.logits(checkpoint.dims, checkpoint.tensors, sequences, progress)
    _require_numbers(
        expected, "the checkpoint, computed in fp32,", "Its weights are broken: train or download it again"
    )
    library = (
        reference_library.compare(checkpoint, sequences[0], expected[0]) if with_reference_library else None
    )
    graph = widened(graph) if spec.options.dtype == "bfloat16" else graph
    few = segments.layers_at_once(checkpoint.tensors.shapes)
    scratch = directory / "check.onnx"
    results = segments.run(scratch, graph, spec, few, OUTPUTS, accuracy_level, sequences, progress)
    logits = [result["logits"] for result in results]
    remedy = "Use a wider --precision or --activations"
    _require_numbers(logits, f"the {spec.options.weight_precision} graph", remedy, PrecisionError)
    # With codes, the prediction at the first token of a text is not compared. Some of its activations are far
    # larger than all others (1,200 to 2,000 times at an input of down_proj in the default checkpoint), so 8
    # bits keep little of the rest, and its prediction is never used. Errors of its KV entries show in the
    # predictions after it.
    skipped = 0 if spec.options.quantization is None else 1
    first = len(prompts)
    drift, size = _drift(results[:first], expected[:first], mask, library, skipped)
    if bounded:
        require(drift, spec.options.weight_precision, size)
    return replace(drift, text=compare_text(logits[first:], expected[first:], paragraphs, mask))


def _drift(
    results: Sequence[dict[str, np.ndarray]],
    expected: Sequence[np.ndarray],
    mask: int | None,
    library: str | None,
    skipped: int,
) -> tuple[ParityReport, float]:
    """The drift and the size of the largest logit, without the first `skipped` predictions of each text."""
    logit_error = confidence_error = size = 0.0
    positions = matches = 0
    for result, exact in zip(results, expected, strict=True):
        first = min(skipped, len(exact) - 1)
        exact = exact[first:]
        token_ids, confidence, logits = (result[name][first:] for name in OUTPUTS)
        allowed = np.arange(exact.shape[-1]) != mask
        size = max(size, float(np.abs(exact[:, allowed]).max()))
        logit_error = max(logit_error, float(np.abs(logits - exact)[:, allowed].max()))
        exact = exact + np.where(allowed, np.float32(0), np.float32(NEVER))
        positions += len(exact)
        matches += int((token_ids == exact.argmax(-1)).sum())
        weights = np.exp(exact - exact.max(-1, keepdims=True))
        probabilities = weights / weights.sum(-1, keepdims=True)
        exact_confidence = np.take_along_axis(probabilities, token_ids[:, None], 1)[:, 0]
        confidence_error = max(confidence_error, float(np.abs(confidence - exact_confidence).max()))
    return ParityReport(positions, matches, logit_error, confidence_error, library), size


def _require_numbers(
    arrays: Sequence[np.ndarray], who: str, remedy: str, error: type[ExportError] = ExportError
) -> None:
    """Raise `error` for logits that are NaN or Inf, which the comparisons would not notice."""
    bad = sum(int(array.size - np.count_nonzero(np.isfinite(array))) for array in arrays)
    if bad:
        total = sum(array.size for array in arrays)
        raise error(f"{who} gives NaN or Inf for {bad} of {total} logits. Nothing was written. {remedy}")


def require(drift: ParityReport, precision: str, size: float) -> None:
    """Raise PrecisionError if `drift` exceeds the bounds of `precision` for logits of up to `size`."""
    logit, confidence, share = BOUNDS[precision]
    logit *= max(size, 1.0)
    is_good = (
        drift.max_logit_error <= logit
        and drift.max_confidence_error <= confidence
        and drift.argmax_matches >= share * drift.positions
    )
    if not is_good:
        raise PrecisionError(
            f"the {precision} graph does not agree with the checkpoint: logit error"
            f" {drift.max_logit_error:.3g} (bound {logit:.2g}), confidence error"
            f" {drift.max_confidence_error:.3g} (bound {confidence}), argmax"
            f" {drift.argmax_matches}/{drift.positions} (bound {share:.0%}); nothing was written."
            f" {REMEDIES.get(precision, 'Use a wider --precision')}, or --allow-drift to keep the bundle"
            " and measure it on your own task (docs/quantization.md)"
        )


def _token_ids(checkpoint: Checkpoint, texts: Sequence[str], max_tokens: int, block: int) -> list[list[int]]:
    """At most `max_tokens` tokens of each text that has any, with room for a block after them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(checkpoint.vocabulary.tokenizer_json)
    max_tokens = min(max_tokens, checkpoint.dims.context_length - block)
    ids = [tokenizer.encode(text).ids[:max_tokens] for text in texts]
    ids = [[i for i in each if i < checkpoint.dims.vocab_size] for each in ids]
    return [each for each in ids if each]
