"""Draft tokens, predicted next tokens that the next step verifies, and estimates of what a step will accept.

Sums use reduce(add): some versions of Python round sum() otherwise, and the C++ runtime must get the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import add, mul
from typing import Literal

Source = Literal["masks", "prompt_lookup"]

MAX_LOOKUP = 32  # tokens of one lookup: about as wide as the widest step whose cost is measured
LOOKUP_CONFIDENCE = 0.6  # of a token that followed the same tokens before; AcceptanceRates corrects it

FIRST_RATE = 0.5  # of a mask before any observation; counts as one observation
MASK_KEEP = 0.75  # weight of an older step's masks after a newer step's, in exact mode

PASS_KEEP = 0.98  # weight of an older observation after a newer one of the same prediction, with a tau
MISSED = 0.7  # factor for a position whose last prediction did not pass

EDGES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 0.995)  # between confidences that are counted together
OUTCOME_SHARE = 1 / 24  # of the way to 0 or 1 by which one outcome moves acceptance probabilities
LAST_PROMPTS = 8  # the last ones, which tell what the masks of the next prompt will bring


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Tokens for the positions after a sequence's last pending one, and the source's confidences, 0 to 1.

    `forced`: indices of tokens that are accepted whenever all before them are, because a grammar forces them.
    """

    token_ids: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    source: Source = "masks"
    forced: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.token_ids)

    def num_forced(self, count: int) -> int:
        """How many of the first `count` are forced."""
        return sum(i < count for i in self.forced)


NONE = DraftTokens()


class PromptLookup:
    """Proposes what followed the last `length` tokens where they occurred before in the prompt or answer, at
    most MAX_LOOKUP tokens.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._after: dict[tuple[int, ...], int] = {}  # the position after the latest occurrence
        self._indexed = 0

    def propose(self, tokens: Sequence[int], most: int) -> DraftTokens:
        # The last tokens are not indexed yet, so that an earlier occurrence is found.
        for end in range(max(self._indexed, self.length), len(tokens)):
            self._after[tuple(tokens[end - self.length : end])] = end
        self._indexed = max(self._indexed, len(tokens))
        start = self._after.get(tuple(tokens[-self.length :])) if len(tokens) >= self.length else None
        if start is None:
            return NONE
        token_ids = tuple(tokens[start : start + min(most, MAX_LOOKUP)])
        return DraftTokens(token_ids, (LOOKUP_CONFIDENCE,) * len(token_ids), "prompt_lookup")


class MaskRates:
    """How likely the predictions of a sequence's first mask, second mask, ... are right if those before are.

    An observation fades with newer ones of the same mask, not with time, so that a mask that is not fed is
    not forgotten. The mean over all masks counts as the first observation of each mask, and fades as well.
    """

    def __init__(self, keep: float = MASK_KEEP) -> None:
        self._keep = keep
        self._weights: list[float] = []
        self._sums: list[float] = []
        self._expected: tuple[float, ...] = ()  # since the last step with masks

    def record(self, values: Sequence[float]) -> None:
        """A step's masks: the probability that each prediction is right, or 0 or 1 if that is known."""
        self._expected = ()
        missing = len(values) - len(self._sums)
        self._weights += [0.0] * missing
        self._sums += [0.0] * missing
        for k, value in enumerate(values):
            self._weights[k] = self._weights[k] * self._keep + 1.0
            self._sums[k] = self._sums[k] * self._keep + value

    def rates(self, masks: int) -> list[float]:
        """The mean of each mask, the first `masks` of them."""
        mean = (reduce(add, self._sums, 0.0) + FIRST_RATE) / (reduce(add, self._weights, 0.0) + 1.0)
        firsts = [1.0 - (1.0 - self._keep) * w for w in self._weights]
        rates = [
            (s + first * mean) / (w + first)
            for s, w, first in zip(self._sums, self._weights, firsts, strict=True)
        ]
        return rates[:masks] + [mean] * (masks - len(rates))

    def expected(self, masks: int) -> tuple[float, ...]:
        """Expected number of right predictions, up to the first wrong one, of 0, 1, ... `masks` masks."""
        if len(self._expected) <= masks:
            self._expected = tuple(expected_run(self.rates(masks)))
        return self._expected[: masks + 1]


def expected_run(probabilities: Sequence[float], first: float = 0.0) -> list[float]:
    """`first` plus the expected length of the run of successes in the first 0, 1, ... of `probabilities`."""
    return list(accumulate(accumulate(probabilities, mul), initial=first))


class PassRates:
    """How often the prediction of the next token and those of the masks passed tau.

    Predictions after the first that did not pass count too. Their context is worse than that of the next
    step, but a step shows all of them at once: one all masks tells predictable text from other text.
    """

    def __init__(self) -> None:
        self._tried, self._passed = 0.0, 0.0  # of the next token
        self._masks = MaskRates(PASS_KEEP)
        self._last_passed: Sequence[bool] = ()  # of the last step, from the next step's first mask on

    def record(self, accepted: int, passed: Sequence[bool]) -> None:
        """A step accepted `accepted` tokens, and only tau ended its run; `passed[k]`: prediction k passed."""
        self._tried = self._tried * PASS_KEEP + 1.0
        self._passed = self._passed * PASS_KEEP + passed[0]
        self._masks.record(passed[1:])
        self._last_passed = passed[accepted + 1 :]

    def expected(self, masks: int) -> list[float]:
        """Expected tokens of a step with 0, 1, ... `masks` masks: at least 1, and none less than the one
        before.
        """
        rates = self._masks.rates(masks)
        for k, has_passed in enumerate(self._last_passed[:masks]):
            if not has_passed:
                rates[k] *= MISSED
        return expected_run(rates, first=1.0)

    @property
    def certainty(self) -> float:
        """The share of next-token predictions that passed. Masks are hardly better."""
        return (self._passed + 1.0) / (self._tried + 1.0)


class AcceptanceRates:
    """The acceptance probability of a draft token, if all before it are accepted: its confidence, moved by
    each outcome of an earlier draft token of similar confidence a share of the way to 0 or 1.

    The first draft token that was not fed has an outcome too, because the step gives the token of its
    position. So draft tokens need no trials. Shared by the sequences of a session: a new one starts with what
    is known.
    """

    def __init__(self) -> None:
        # By source and class of confidence: what is left of the confidence, and the sum of the outcomes.
        self._estimates: dict[tuple[Source, int], tuple[float, float]] = {}
        # The mean acceptance probability of the masks of each of the last prompts.
        self._prompts: tuple[float, ...] = (1.0,)

    def probability(self, source: Source, confidence: float) -> float:
        """Between 0 and 1; NaN counts as 0."""
        confidence = min(confidence, 1.0) if confidence > 0 else 0.0
        weight, accepted = self._estimates.get((source, bisect_right(EDGES, confidence)), (1.0, 0.0))
        return weight * confidence + accepted

    def probabilities(self, draft_tokens: DraftTokens) -> list[float]:
        """The acceptance probability of each draft token."""
        return [
            1.0 if i in draft_tokens.forced else self.probability(draft_tokens.source, confidence)
            for i, confidence in enumerate(draft_tokens.confidences)
        ]

    def record(self, draft_tokens: DraftTokens, token_ids: Sequence[int]) -> None:
        """The text has `token_ids` in place of `draft_tokens`, fed or not; up to the first that differs."""
        estimates = dict(self._estimates)
        for i, (draft_token, token) in enumerate(zip(draft_tokens.token_ids, token_ids, strict=False)):
            if i in draft_tokens.forced:
                continue
            confidence = draft_tokens.confidences[i]
            key = (draft_tokens.source, bisect_right(EDGES, confidence if confidence > 0 else 0.0))
            weight, accepted = estimates.get(key, (1.0, 0.0))
            share = OUTCOME_SHARE if draft_token == token else 0.0
            estimates[key] = ((1.0 - OUTCOME_SHARE) * weight, (1.0 - OUTCOME_SHARE) * accepted + share)
        self._estimates = estimates  # replaced at once, because sequences of other threads read it

    def record_prompt(self, probabilities: Sequence[float]) -> None:
        """The acceptance probabilities of a prompt's masks, at least one."""
        mean = reduce(add, probabilities) / len(probabilities)
        self._prompts = (*self._prompts[1 - LAST_PROMPTS :], mean)

    def expected_of_prompt(self, masks: int) -> list[float]:
        """Expected number of accepted draft tokens of 0, 1, ... `masks` masks of a prompt: the mean over the
        last prompts, which may be of several kinds of text, as if each had one acceptance probability.
        """
        runs = [expected_run([mean] * masks) for mean in self._prompts]
        return [reduce(add, values) / len(runs) for values in zip(*runs, strict=True)]


@dataclass(frozen=True, slots=True)
class StepForecast:
    """The slots that one sequence may feed, and their expected outcome.

    pending: tokens that are fed in any case.
    probabilities: the acceptance probability of each draft token if those before it are accepted.
    ending: the acceptance probability of an end-of-sequence token proposed after them, None if none is. Such
        a token is not fed: the output before it decides already.
    expected: expected[m] is the expected number of accepted draft tokens of m masks, up to the most masks.
    room: slots after the pending tokens.
    """

    pending: int
    probabilities: tuple[float, ...]
    ending: float | None
    expected: tuple[float, ...]
    room: int

    @property
    def max_masks(self) -> int:
        return len(self.expected) - 1

    def all_accepted(self, masks: int) -> float:
        """The probability that all draft tokens of this many masks are accepted."""
        return self.expected[masks] - self.expected[masks - 1] if masks else 1.0
