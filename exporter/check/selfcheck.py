"""The check that every export ends with: the written graph against a plain torch forward of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx

from ...runtime.bundle.manifest import Drift, ModelInfo
from ...runtime.device.ort import OrtBackend
from ...runtime.errors import ExportError
from ..checkpoint.open import Checkpoint
from ..graph.step import NEVER, StepGraph
from . import bfloat16 as emulate
from . import reference, segments

PROMPTS = (
    "The capital of France is Paris. The capital of Italy is",
    '[{"name": "set_light", "arguments": {"room": "kitchen", "brightness": 40}}]',
    "Tom has 12 apples. He buys 5 more and gives 4 away. 12 + 5 = 17. 17 - 4 =",
    "def add(a, b):\n    return a + b\n",
)
PROMPT_TOKENS = 24  # at most, of each prompt
FLIP_TAUS = (0.9, 0.95, 0.99)
# Largest error that passes, by the graph's precision: (logits, confidence, share of argmax matches).
BOUNDS = {
    "float32": (1e-2, 1e-3, 0.99),
    "float16": (0.5, 0.05, 0.9),
    "bfloat16": (4.0, 0.4, 0.8),
    "w8a8": (8.0, 0.8, 0.75),
    "int8": (8.0, 0.8, 0.75),
    "int4": (16.0, 1.0, 0.5),
}
REMEDIES = {"int4": "Use --precision int8 (or, with `onnx`, w8a8, or --asymmetric)"}


def check(
    directory: Path,
    graph: onnx.ModelProto,
    outputs: tuple[str, ...],
    checkpoint: Checkpoint,
    model: ModelInfo,
    spec: StepGraph,
    accuracy_level: int,
    progress: Callable[[], None] | None = None,
) -> Drift:
    """Run `graph` (of `spec` with logits, its weights in `directory`) on a few prompts followed by masks; measure the drift.

    Each prompt goes in as two steps, so that KV entries written by the first are read by the second.
    """
    vocabulary, dims = checkpoint.vocabulary, checkpoint.dims
    masks = [vocabulary.mask_token_id] * (spec.block - 1)
    sequences = [ids + masks for ids in _prompts(checkpoint, spec.block)]
    expected = reference.logits(dims, checkpoint.tensors, sequences, progress)
    worst_logit = worst_confidence = 0.0
    positions = matches = 0
    flips = dict.fromkeys(FLIP_TAUS, 0)
    few = _layers_at_once(checkpoint)
    ran = _run(directory, graph, outputs, model, spec, accuracy_level, sequences, few)
    for got, want in zip(ran, expected, strict=True):
        want[:, vocabulary.mask_token_id] += np.float32(NEVER)
        keep = np.arange(dims.vocab_size) != vocabulary.mask_token_id
        token_ids, confidence, logits = got
        positions += len(want)
        matches += int((token_ids == want.argmax(-1)).sum())
        worst_logit = max(worst_logit, float(np.abs(logits - want)[:, keep].max()))
        weights = np.exp(want - want.max(-1, keepdims=True))
        probabilities = weights / weights.sum(-1, keepdims=True)
        chosen = np.take_along_axis(probabilities, token_ids[:, None], 1)[:, 0]
        worst_confidence = max(worst_confidence, float(np.abs(confidence - chosen).max()))
        for tau in FLIP_TAUS:
            flips[tau] += int(((confidence >= tau) != (probabilities.max(-1) >= tau)).sum())
    return Drift(
        positions, matches, worst_logit, worst_confidence, {str(tau): count for tau, count in flips.items()}
    )


def require(drift: Drift, precision: str) -> None:
    """Raise ExportError when `drift` is beyond the bounds of `precision`."""
    logit, confidence, share = BOUNDS[precision]
    good = (
        drift.max_logit_error <= logit
        and drift.max_confidence_error <= confidence
        and drift.argmax_matches >= share * drift.positions
    )
    if not good:
        raise ExportError(
            f"the {precision} graph does not agree with the checkpoint: logit error {drift.max_logit_error:.3g} (bound {logit}),"
            f" confidence error {drift.max_confidence_error:.3g} (bound {confidence}), argmax {drift.argmax_matches}/{drift.positions}"
            f" (bound {share:.0%}); nothing was written. {REMEDIES.get(precision, 'Use a wider --precision')}, or --allow-drift to keep the bundle"
            " all the same and measure it on your own task (docs/quantization.md)"
        )


def _layers_at_once(checkpoint: Checkpoint) -> int | None:
    """How many layers of a large model the check runs together; None for a model that it runs whole."""
    shapes = checkpoint.tensors.shapes
    if segments.count_weights(shapes) <= segments.WHOLE:
        return None
    layer = segments.count_weights(
        {name: shape for name, shape in shapes.items() if name.startswith("model.layers.0.")}
    )
    return max(1, segments.SEGMENT // layer)


def _prompts(checkpoint: Checkpoint, block: int) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(checkpoint.vocabulary.tokenizer_json)
    room = checkpoint.dims.context_length - block
    ids = [tokenizer.encode(p).ids[: min(PROMPT_TOKENS, room)] for p in PROMPTS]
    ids = [[i for i in prompt if i < checkpoint.dims.vocab_size] for prompt in ids]
    return [prompt for prompt in ids if prompt] or [[checkpoint.vocabulary.eos_token_ids[0]]]


def _run(
    directory: Path,
    graph: onnx.ModelProto,
    outputs: tuple[str, ...],
    model: ModelInfo,
    spec: StepGraph,
    accuracy_level: int,
    sequences: Sequence[Sequence[int]],
    few: int | None,
) -> list[tuple[np.ndarray, ...]]:
    """token_ids, confidence and logits of each sequence; a large model goes through `few` layers at a time."""
    scratch = directory / "check.onnx"
    is_emulated = spec.precision == "bfloat16"
    graph = emulate.widened(graph) if is_emulated else graph
    try:
        if few is not None:
            wanted = ("token_ids", "confidence", "logits")
            made = segments.run(scratch, graph, spec, few, wanted, accuracy_level, sequences)
            return [tuple(result[name] for name in wanted) for result in made]
        onnx.save(graph, scratch)
        kv_dtype = "float32" if is_emulated else spec.precision
        backend = OrtBackend(
            scratch, outputs, model, kv_dtype, accuracy_level=accuracy_level, kv_layout=spec.kv_layout
        )
        results = []
        for sequence in sequences:
            cache, parts = backend.new_cache(1), []
            half = max(1, len(sequence) // 2)
            for start, stop in ((0, half), (half, len(sequence))):
                ids = np.array([sequence[start:stop]], np.int64)
                cache.reserve(stop)
                if ids.size:
                    output = backend.step(cache, 0, ids, np.array([start]), np.arange(ids.size)[None], True)
                    assert output.logits is not None
                    parts.append((output.token_ids[0], output.confidence[0], output.logits[0]))
            results.append(tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        return results
    finally:
        scratch.unlink(missing_ok=True)
