"""Choosing tokens from logits on the host: repetition penalty, temperature, top-k, top-p, min-p and seeded
draws.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .config import GenerationConfig

MASK64 = 2**64 - 1
FLOAT = np.finfo(np.float32)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on `seed` and `position` only (splitmix64), so that no run length
    changes a draw.
    """
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return ((z ^ (z >> 31)) >> 11) / 2**53


def choose(
    logits: np.ndarray,
    config: GenerationConfig,
    seen: Iterable[int],
    position: int,
    allowed: np.ndarray | None = None,
) -> tuple[int, float]:
    """Pick the token for absolute `position` from float32 logits [vocab]; returns it and its confidence.

    The repetition penalty (as in CTRL: divide positive logits of `seen` tokens, multiply negative ones)
    belongs to the model's distribution; temperature, top-k and top-p only shape the draw. The confidence is
    measured on the former. `allowed`, bool [vocab]: nothing else is picked.
    """
    penalized = _penalized(logits, config.repetition_penalty, seen)
    masked = penalized if allowed is None else np.where(allowed, penalized, -np.inf)
    token = (
        int(masked.argmax()) if config.is_greedy else _draw(masked, config, uniform(config.seed, position))
    )
    return token, confidence_of(penalized, token, config.metric)


def confidence_of(logits: np.ndarray, token: int, metric: str) -> float:
    """Probability of `token`, its margin over the best other token, or the entropy (nats), from float32
    logits [vocab].
    """
    weights = np.exp(logits - logits.max())
    probabilities = weights / weights.sum()
    if metric == "probability":
        return float(probabilities[token])
    if metric == "entropy":
        positive = probabilities[probabilities > 0]
        return float(-(positive * np.log(positive)).sum())
    own = float(probabilities[token])
    probabilities[token] = 0
    return own - float(probabilities.max())


def _penalized(logits: np.ndarray, penalty: float, seen: Iterable[int]) -> np.ndarray:
    if penalty == 1:
        return logits
    changed = logits.copy()
    ids = np.fromiter(set(seen), np.int64)
    least, most = float(FLOAT.tiny), float(FLOAT.max)  # any penalty leaves numbers
    factor = np.float32(min(max(penalty, least), most))
    with np.errstate(over="ignore"):
        moved = np.where(changed[ids] > 0, changed[ids] / factor, changed[ids] * factor)
    changed[ids] = moved.clip(-most, most)
    return changed


def _draw(logits: np.ndarray, config: GenerationConfig, number: float) -> int:
    order = np.argsort(-logits, kind="stable")
    if config.top_k:
        order = order[: config.top_k]
    kept_logits = logits[order].astype(np.float64)
    with np.errstate(
        over="ignore"
    ):  # the largest is subtracted first: no temperature is too small for what is left
        weights = np.exp((kept_logits - kept_logits[0]) / config.temperature)
    cumulative = np.cumsum(weights / weights.sum())
    # Nucleus: the smallest set whose probability reaches top_p; always at least one token.
    kept = min(int(np.searchsorted(cumulative, config.top_p)) + 1, len(order))
    if config.min_p:
        kept = min(kept, int(np.count_nonzero(weights >= config.min_p)))  # the likeliest weighs 1
    return int(
        order[
            min(
                int(np.searchsorted(cumulative[:kept] / cumulative[kept - 1], number, side="right")), kept - 1
            )
        ]
    )
