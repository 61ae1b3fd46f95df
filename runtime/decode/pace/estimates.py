"""Estimates of what a step will accept, from what earlier steps accepted.

Sums use reduce(add): some versions of Python round sum() otherwise, and the C++ runtime must get the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import reduce
from operator import add

from .proposals import Proposals, Source

FIRST = 0.5  # a mask's chance before any observation; counts as one observation

RATE_KEEP = 0.98  # weight of an older observation after a newer one of the same prediction
RATE_BELIEF = 1.0  # observations of one mask that the mean over all masks counts for
MISSED = 0.7  # factor of the chance of a position whose last prediction did not pass

EDGES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 0.995)  # between confidences that are counted together
CONFIDENCE_WEIGHT = 16.0  # verified proposals that a confidence itself counts for
HOPE_KEEP = 0.99  # weight of all counts after each verifying step, so that a source gets another chance
MASK_KEEP = 0.75  # weight of an older step's masks after a newer step's


class PassRates:
    """How often the prediction of the next token, k = 0, and those of the masks k = 1, 2, ... passed tau.

    Predictions after the first that did not pass count too. Their context is worse than that of the next
    step, but a step shows all of them at once: one full window tells predictable text from other text. An
    observation fades with newer ones of the same prediction, not with time, so that a mask that is not tried
    is not forgotten.
    """

    def __init__(self) -> None:
        self._tried = [0.0]
        self._passed = [0.0]
        self._missed: Sequence[bool] = ()  # the last step's passes, from the next step's first mask on

    def saw(self, accepted: int, passed: Sequence[bool]) -> None:
        """A step accepted `accepted` tokens, and only tau ended its run; `passed[k]`: prediction k passed."""
        missing = len(passed) - len(self._tried)
        self._tried += [0.0] * missing
        self._passed += [0.0] * missing
        for k, has_passed in enumerate(passed):
            self._tried[k] = self._tried[k] * RATE_KEEP + 1.0
            self._passed[k] = self._passed[k] * RATE_KEEP + (1.0 if has_passed else 0.0)
        self._missed = passed[accepted + 1 :]

    def expected(self, masks: int) -> list[float]:
        """Expected tokens of a step with 0, 1, ... `masks` masks: at least 1, and none less than the one
        before.
        """
        level = (reduce(add, self._passed[1:], 0.0) + FIRST) / (reduce(add, self._tried[1:], 0.0) + 1.0)
        tokens, chance = [1.0], 1.0
        for k in range(1, masks + 1):
            tried, passed = (self._tried[k], self._passed[k]) if k < len(self._tried) else (0.0, 0.0)
            rate = (passed + RATE_BELIEF * level) / (tried + RATE_BELIEF)
            chance *= rate if k > len(self._missed) or self._missed[k - 1] else rate * MISSED
            tokens.append(tokens[-1] + chance)
        return tokens

    @property
    def certainty(self) -> float:
        """How often the prediction of the next token passed. Masks are hardly better."""
        return (self._passed[0] + 1.0) / (self._tried[0] + 1.0)


class Hopes:
    """How likely a proposal holds if all before it do: its confidence, corrected by how often such ones held.

    Shared by the rows of a session, so that a new row starts with the counts of earlier rows.
    """

    def __init__(self) -> None:
        # By source and class of confidence: how many proposals were tried, and how many held.
        self._counts: dict[tuple[Source, int], tuple[float, float]] = {}

    def of(self, source: Source, confidence: float) -> float:
        """Between 0 and 1; NaN counts as 0."""
        confidence = confidence if confidence > 0 else 0.0
        tried, held = self._counts.get((source, bisect_right(EDGES, confidence)), (0.0, 0.0))
        return (held + CONFIDENCE_WEIGHT * min(confidence, 1.0)) / (tried + CONFIDENCE_WEIGHT)

    def of_all(self, proposals: Proposals) -> list[float]:
        """The hope of each proposal."""
        return [
            1.0 if i in proposals.forced else self.of(proposals.source, confidence)
            for i, confidence in enumerate(proposals.confidences)
        ]

    def saw(self, proposals: Proposals, num_fed: int, num_verified: int) -> None:
        """The first `num_verified` of `num_fed` proposals held. Those after the next one showed nothing."""
        if num_fed == proposals.num_forced(num_fed):
            return
        counts = {key: (tried * HOPE_KEEP, held * HOPE_KEEP) for key, (tried, held) in self._counts.items()}
        for i in range(min(num_verified + 1, num_fed)):
            if i in proposals.forced:
                continue
            confidence = proposals.confidences[i]
            key = (proposals.source, bisect_right(EDGES, confidence if confidence > 0 else 0.0))
            tried, held = counts.get(key, (0.0, 0.0))
            counts[key] = (tried + 1.0, held + (1.0 if i < num_verified else 0.0))
        self._counts = counts  # replaced at once, because rows of other threads read it


class Foresight:
    """How likely the proposal of a row's first mask holds, of its second mask, and so on.

    All masks of every step count, by the hopes of their proposals, without waiting for a verification.
    """

    def __init__(self) -> None:
        self._tried: list[float] = []
        self._hoped: list[float] = []

    def saw(self, hopes: Sequence[float]) -> None:
        """The masks of a step gave proposals with these hopes."""
        missing = len(hopes) - len(self._tried)
        self._tried += [0.0] * missing
        self._hoped += [0.0] * missing
        for k, hope in enumerate(hopes):
            self._tried[k] = self._tried[k] * MASK_KEEP + 1.0
            self._hoped[k] = self._hoped[k] * MASK_KEEP + hope

    def expected(self, most: int) -> list[float]:
        """Expected number of proposals of 0, 1, ... `most` masks that hold."""
        level = (reduce(add, self._hoped, 0.0) + FIRST) / (reduce(add, self._tried, 0.0) + 1.0)
        total, chance = [0.0], 1.0
        for k in range(most):
            tried, hoped = (self._tried[k], self._hoped[k]) if k < len(self._tried) else (0.0, 0.0)
            chance *= (hoped + level) / (tried + 1.0)
            total.append(total[-1] + chance)
        return total
