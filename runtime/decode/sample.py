"""Choosing tokens from logits on the host: bias, penalties, temperature, top-k, top-p, min-p, draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import overload

import numpy as np

from ..errors import SessionError
from .config import GenerationConfig

FLOAT = np.finfo(np.float32)


class Penalties:
    """The bias and the penalties of one row. They are applied in this order, in float32:

    1. `logit_bias` is added to the logits of its tokens.
    2. `repetition_penalty` (as in CTRL) divides positive logits of tokens that the prompt or the answer
       contains, and multiplies negative ones.
    3. From the logits of tokens that the answer contains, `presence_penalty` is subtracted, and
       `frequency_penalty` for each time that they occur.

    Tokens are counted once, so that a step does not take longer after a longer text.
    """

    def __init__(self, config: GenerationConfig, num_prompt: int = 0) -> None:
        self._config, self._num_prompt = config, num_prompt
        bias = dict(config.logit_bias)
        self._bias_ids = np.fromiter(bias, np.int64)
        self._bias = np.fromiter(bias.values(), np.float32)
        self._repeats = config.repetition_penalty != 1
        self._counts = bool(config.presence_penalty or config.frequency_penalty)
        self._seen, self._answered = Occurrences(), Occurrences()  # in prompt and answer, in the answer
        self._num_tokens = 0
        self._guesses: list[int] = []

    def follow(self, tokens: Sequence[int]) -> Penalties:
        """Continue with the token after `tokens`, the prompt and the answer so far; forget guesses."""
        if self._repeats or self._counts:
            while self._guesses:
                self._seen.remove_last(self._guesses[-1])
                self._answered.remove_last(self._guesses.pop())
            for position in range(self._num_tokens, len(tokens)):
                self._add(tokens[position], is_answer=position >= self._num_prompt)
            self._num_tokens = len(tokens)
        return self

    def guess(self, token: int) -> None:
        """Continue with the token after `token`, until the next `follow`."""
        if self._repeats or self._counts:
            self._guesses.append(token)
            self._add(token, is_answer=True)

    def _add(self, token: int, *, is_answer: bool) -> None:
        self._seen.add(token)
        if is_answer:
            self._answered.add(token)

    def of(self, logits: np.ndarray) -> np.ndarray:
        """Logits float32 [vocab] with bias and penalties; the same array if there are none. Raises
        SessionError for logits that are not numbers.
        """
        config = self._config
        if not np.isfinite(logits.max()):
            raise SessionError(
                "the model's logits are not numbers (NaN or infinite), so no token can be chosen; export the"
                " bundle again",
                code="failed",
            )
        if not (len(self._bias_ids) or self._repeats or self._counts):
            return logits
        changed = logits.copy()
        changed[self._bias_ids] += self._bias
        if self._repeats:
            ids = self._seen.ids
            lowest, highest = float(FLOAT.tiny), float(FLOAT.max)  # so that no penalty makes a logit infinite
            factor = np.float32(min(max(config.repetition_penalty, lowest), highest))
            values = changed[ids]
            with np.errstate(over="ignore"):
                values = np.where(values > 0, values / factor, values * factor)
            changed[ids] = values.clip(-highest, highest)
        if self._counts:
            each = np.float32(config.frequency_penalty) * self._answered.counts
            changed[self._answered.ids] -= np.float32(config.presence_penalty) + each
        return changed


class Occurrences:
    """Distinct tokens in the order of their first occurrence, int64, and how often each occurred, float32."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._ids, self._counts = np.zeros(64, np.int64), np.zeros(64, np.float32)

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> np.ndarray:
        return self._counts[: len(self._places)]

    def add(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        self._counts[place] += 1

    def remove_last(self, token: int) -> None:
        """Remove the token that was added last."""
        place = self._places[token]
        self._counts[place] -= 1
        if not self._counts[place]:
            del self._places[token]


MASK64 = 2**64 - 1
REACHES = (8.0, 16.0, math.inf)  # a draw looks at logits that are this many temperatures below the largest
SORTED = 512  # tokens that a draw sorts; more are counted in as many bins first

Top = tuple[tuple[int, float], ...]
"""The most likely tokens at a position with their natural log-probabilities, best first."""


def splitmix64(seed: int, position: int) -> int:
    """The 64-bit number of a position: output `position` of Vigna's generator of that name."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends only on `seed` and `position`, not on how many tokens a step gives."""
    return (splitmix64(seed, position) >> 11) / 2**53


class SampledTokens(Sequence[int]):
    """The tokens from absolute position `first` on by logits [predictions, vocab], each drawn when it is
    first read.

    A draw takes time, and verification reads no token after the last that it accepts; a tau reads all.
    `penalized` has the logits of the tokens that were drawn, with the penalties that hold there.
    """

    def __init__(
        self, logits: np.ndarray, config: GenerationConfig, penalties: Penalties, first: int
    ) -> None:
        self._logits, self._config, self._penalties, self._first = logits, config, penalties, first
        self.penalized: list[np.ndarray] = []
        self._tokens: list[int] = []

    def __len__(self) -> int:
        return len(self._logits)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        stop = index + 1 if isinstance(index, int) else index.indices(len(self))[1]
        for i in range(len(self._tokens), stop):
            self.penalized.append(self._penalties.of(self._logits[i]))
            self._tokens.append(_pick(self.penalized[i], self._config, self._first + i))
            # A token counts only if all earlier ones are accepted, so these are part of the text.
            self._penalties.guess(self._tokens[i])
        return self._tokens[index]

    def confidences(self, count: int) -> list[float]:
        """Confidences of the first `count` tokens."""
        metric = self._config.metric
        return [confidence_of(self.penalized[i], token, metric) for i, token in enumerate(self[:count])]


def choose(
    logits: np.ndarray,
    config: GenerationConfig,
    penalties: Penalties,
    position: int,
    allowed: np.ndarray | None = None,
) -> tuple[int, float]:
    """Choose the token for absolute `position` from float32 logits [vocab]; return it and its confidence.

    Bias and penalties are part of the model's distribution, from which the confidence is computed.
    Temperature, top-k and top-p only shape the draw. `allowed`, bool [vocab]: the tokens to choose from.
    """
    penalized = penalties.of(logits)
    masked = penalized if allowed is None else np.where(allowed, penalized, np.float32(-np.inf))
    token = _pick(masked, config, position)
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
    probability = float(probabilities[token])
    probabilities[token] = 0
    return probability - float(probabilities.max())


def top_of(logits: np.ndarray, num: int) -> Top:
    """The `num` most likely tokens by float32 logits [vocab]; of equal ones those with the smallest ids."""
    num = min(num, len(logits))
    lowest = np.partition(logits, -num)[-num]
    ids = np.flatnonzero(logits >= lowest)
    ids = ids[np.argsort(-logits[ids], kind="stable")][:num]
    shifted = logits.astype(np.float64) - logits.max()
    logprobs = shifted[ids] - np.log(np.exp(shifted).sum())
    return tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))


def _pick(logits: np.ndarray, config: GenerationConfig, position: int) -> int:
    return int(logits.argmax()) if config.is_greedy else _draw(logits, config, uniform(config.seed, position))


@np.errstate(over="ignore")  # dividing by a tiny temperature may overflow to -inf, which is right
def _draw(logits: np.ndarray, config: GenerationConfig, number: float) -> int:
    """The token at `number` in [0, 1) of the distribution, sorted from the likeliest token on, equal ones by
    id. Takes time linear in the vocabulary.
    """
    top, temperature = logits.max(), config.temperature
    top_k = config.top_k if config.top_k < len(logits) else 0
    is_cut = config.top_p < 1 or config.min_p > 0
    enough = config.top_p if config.top_p < 1 else math.inf if is_cut else math.nextafter(number, 2)
    total = None
    for reach in REACHES:
        lowest = np.partition(logits, -top_k)[-top_k] if top_k else top - reach * temperature
        ids = np.flatnonzero(logits >= max(lowest, FLOAT.min))  # leaves out tokens that are not allowed
        if top_k:
            ids = np.sort(ids[np.argsort(-logits[ids], kind="stable")][:top_k])
        weights = np.exp((logits[ids].astype(np.float64) - top) / temperature)
        if total is None:
            total = weights.sum() + (0.0 if top_k else _rest(logits, top, temperature, ids))
        if top_k or weights.sum() / total >= enough or weights.min() < config.min_p:
            break
    whole, probabilities = 1.0, weights / total
    if config.top_p < 1:  # nucleus: the smallest set with this probability; always at least one token
        whole = _find(logits, ids, probabilities, math.nextafter(config.top_p, 0))[1]
    if config.min_p:
        whole = min(whole, float(probabilities[weights >= config.min_p].sum()))  # the likeliest weighs 1
    return _find(logits, ids, probabilities, number * whole)[0]


def _find(logits: np.ndarray, ids: np.ndarray, weights: np.ndarray, sum_before: float) -> tuple[int, float]:
    """The first of `ids`, sorted from the likeliest on, with which the sum of the weights is greater than
    `sum_before`, or else the last one; and that sum. `ids` rise.
    """
    skipped = 0.0
    while len(ids) > SORTED and (values := logits[ids].astype(np.float64)).max() > values.min():
        depths = values.max() - values
        bins = (depths * ((SORTED - 1) / depths.max())).astype(np.intp)  # the likeliest first
        sums = skipped + np.cumsum(np.bincount(bins, weights))
        chosen = min(int(np.searchsorted(sums, sum_before, side="right")), len(sums) - 1)
        skipped = float(sums[chosen - 1]) if chosen else skipped
        ids, weights = ids[bins == chosen], weights[bins == chosen]
    order = np.argsort(-logits[ids], kind="stable")
    sums = skipped + np.cumsum(weights[order])
    i = min(int(np.searchsorted(sums, sum_before, side="right")), len(ids) - 1)
    return int(ids[order[i]]), float(sums[i])


def _rest(logits: np.ndarray, top: np.float32, temperature: float, ids: np.ndarray) -> float:
    """The weight of all tokens but those in `ids`. float32 is enough for it, and six times as fast."""
    weights = np.exp((logits - top) / np.float32(min(max(temperature, float(FLOAT.tiny)), float(FLOAT.max))))
    return float(weights.sum(dtype=np.float64) - weights[ids].sum(dtype=np.float64))
