"""What changes a row's logits before a token is chosen: the bias of tokens, and penalties of earlier ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
        """Logits float32 [vocab] with bias and penalties; the same array if there are none."""
        config = self._config
        if not (len(self._bias_ids) or self._repeats or self._counts):
            return logits
        changed = logits.copy()
        changed[self._bias_ids] += self._bias
        if self._repeats:
            ids = self._seen.ids
            least, most = float(FLOAT.tiny), float(FLOAT.max)  # so that no penalty makes a logit infinite
            factor = np.float32(min(max(config.repetition_penalty, least), most))
            values = changed[ids]
            with np.errstate(over="ignore"):
                values = np.where(values > 0, values / factor, values * factor)
            changed[ids] = values.clip(-most, most)
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
