"""The slow, obvious choice of a token from numpy logits, which the runtime's must equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from mars_export import GenerationConfig
from mars_export.runtime.decode.sample import uniform


def penalized(
    logits: np.ndarray, config: GenerationConfig, prompt: Sequence[int], answer: Sequence[int]
) -> np.ndarray:
    """Token by token, in float32."""
    one, counts, changed = np.float32, Counter(answer), logits.copy()
    for token, bias in dict(config.logit_bias).items():
        changed[token] += one(bias)
    if config.repetition_penalty != 1:
        for token in {*prompt, *answer}:
            penalty, value = one(config.repetition_penalty), changed[token]
            changed[token] = value / penalty if value > 0 else value * penalty
    for token, count in counts.items():
        changed[token] -= one(config.presence_penalty) + one(config.frequency_penalty) * one(count)
    return changed


def pick(logits: np.ndarray, config: GenerationConfig, position: int) -> int:
    """From penalized logits, -inf where a token is not allowed."""
    if config.temperature == 0:
        return int(logits.argmax())
    return sorted_whole(logits, config, uniform(config.seed, position))


def sorted_whole(values: np.ndarray, settings: GenerationConfig, number: float) -> int:
    """The token at `number` in [0, 1) of the whole sorted vocabulary."""
    order = np.argsort(-values, kind="stable")[: settings.top_k or None]
    order = order[np.isfinite(values[order])]
    weights = np.exp((values[order].astype(np.float64) - values[order[0]]) / settings.temperature)
    cumulative = np.cumsum(weights / weights.sum())
    kept = min(int(np.searchsorted(cumulative, settings.top_p)) + 1, len(order))
    kept = min(kept, int(np.count_nonzero(weights >= settings.min_p)))
    place = np.searchsorted(cumulative[:kept] / cumulative[kept - 1], number, side="right")
    return int(order[min(int(place), kept - 1)])


def top(logits: np.ndarray, num: int) -> list[tuple[int, float]]:
    """The most likely tokens by penalized logits, and their log-probabilities."""
    wide = logits.astype(np.float64)
    logprobs = wide - np.log(np.exp(wide).sum())
    return [(int(i), float(logprobs[i])) for i in np.argsort(-logits, kind="stable")[:num]]
