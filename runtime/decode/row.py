"""One sequence of a batch: its tokens, its cursor, what it asked for and how it ended. Knows nothing of the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..accept import accept, passes
from .backend import StepOutput
from .config import GenerationConfig
from .pass_rates import Acceptance
from .sample import choose
from .stats import Stats

FinishReason = Literal["eos", "stop", "length", "capacity", "cancelled"]


@dataclass(frozen=True, slots=True)
class Accepted:
    """What one step gave one row. `finish_reason` is set in the row's last event, which may carry no tokens."""

    row: int
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Predictions:
    """Consecutive predictions for one row, the first for its next unknown position; arrays of one length."""

    token_ids: np.ndarray
    confidences: np.ndarray
    logits: np.ndarray | None

    @classmethod
    def of(cls, output: StepOutput, row: int, count: int, metric: str) -> Predictions:
        """The first `count` predictions of batch row `row`, with the confidence that `metric` names."""
        values = {"probability": output.confidence, "margin": output.margin, "entropy": output.entropy}[
            metric
        ]
        assert values is not None, f"{metric} was not exported: the session checks this first"
        logits = None if output.logits is None else output.logits[row, :count]
        return cls(output.token_ids[row, :count], values[row, :count], logits)

    def then(self, later: Predictions) -> Predictions:
        """These predictions followed by `later` ones."""
        logits = (
            None
            if self.logits is None or later.logits is None
            else np.concatenate([self.logits, later.logits])
        )
        return Predictions(
            np.concatenate([self.token_ids, later.token_ids]),
            np.concatenate([self.confidences, later.confidences]),
            logits,
        )


class Row:
    """A sequence being decoded.

    `tokens` is the prompt and everything accepted; `cursor` counts its final KV entries, so that `tokens[cursor:]` is
    pending. `config` may be replaced while the row runs: the next step uses the new tau. `stop` sees each accepted token
    and says whether it completes a stop condition.
    """

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        config: GenerationConfig,
        eos_ids: Sequence[int],
        stop: Callable[[int], bool] | None = None,
    ) -> None:
        self.index, self.config, self.stop = index, config, stop
        self.tokens = list(prompt)
        self.eos_ids = frozenset(eos_ids if config.eos_ids is None else config.eos_ids)
        self.cursor = 0
        self.finish_reason: FinishReason | None = None
        self.stats = Stats(prompt_tokens=len(prompt))
        self.acceptance = Acceptance()

    @property
    def pending(self) -> list[int]:
        return self.tokens[self.cursor :]

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.cursor

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.config.max_new_tokens - self.stats.tokens

    def look_ahead(self, block: int) -> int:
        """How many predictions the next step may make: one in one-token mode, never more than can be used."""
        most = 1 if self.config.one_token else min(block, self.config.window or block)
        return max(1, min(most, self.remaining))

    def take(self, predictions: Predictions) -> Accepted:
        """Accept from the left what the rule and the limits allow, and note how the row ends if it does."""
        token_ids, confidences = self._candidates(predictions)
        config = self.config
        count = accept(token_ids, confidences, config.tau, config.metric, self.eos_ids, self.remaining)
        for i, token in enumerate(token_ids[:count]):
            self.tokens.append(token)
            if token in self.eos_ids:
                self.finish_reason = "eos"
            elif self.stop is not None and self.stop(token):
                count, self.finish_reason = i + 1, "stop"
                break
        self.stats.count(count)
        # Where something else than tau ended the run, the row is over.
        self.acceptance.saw(count, [passes(c, config.tau, config.metric) for c in confidences])
        if self.finish_reason is None and self.remaining <= 0:
            self.finish_reason = "length"
        return Accepted(self.index, tuple(token_ids[:count]), tuple(confidences[:count]), self.finish_reason)

    def finish(self, reason: FinishReason) -> Accepted:
        """End the row without tokens."""
        self.finish_reason = reason
        return Accepted(self.index, (), (), reason)

    def _candidates(self, predictions: Predictions) -> tuple[list[int], list[float]]:
        if not self.config.needs_logits:
            return predictions.token_ids.tolist(), predictions.confidences.tolist()
        assert predictions.logits is not None, "logits were not exported: the session checks this first"
        tokens: list[int] = []
        confidences: list[float] = []
        # A later candidate only counts if all earlier ones are accepted, so they are part of what it has seen.
        for logits in predictions.logits:
            token, confidence = choose(
                logits, self.config, [*self.tokens, *tokens], len(self.tokens) + len(tokens)
            )
            tokens.append(token)
            confidences.append(confidence)
        return tokens, confidences
