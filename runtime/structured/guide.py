"""A row's grammar at work: which token may come next, which must, what of a guess is worth feeding.

Token ids only: the grammar itself is a Matcher, and who reads schemas lies on a higher floor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

from ..decode.config import GenerationConfig
from ..decode.proposals import Proposals
from ..decode.sample import choose, confidence_of
from ..errors import SessionError

LIKELY = 0.6  # share of the ways to go on, from which the grammar itself is a source of proposals
MOST_LED = 64  # proposals, with what is forced between them
SURE = {"probability": 1.0, "margin": 1.0, "entropy": 0.0}  # of a token that is the only one


class Matcher(Protocol):
    """What a grammar says of the answer so far. Knows no end-of-sequence token: the end is a state."""

    def forced(self) -> Sequence[int]:
        """The tokens that must follow now, as the tokenizer writes them; none where there is a choice."""
        ...

    def mask(self) -> np.ndarray:
        """Bool [vocab]: the tokens that may follow, where nothing is forced. Raises SessionError for none."""
        ...

    def allows(self, token: int) -> bool:
        """The mask's word on one token, which may cost less than all of them."""
        ...

    def likely(self) -> tuple[int, float] | None:
        """Where nothing is forced: a token that is likely all the same, and how likely, or None."""
        ...

    def consume(self, token: int) -> None:
        """The answer goes on with a token that may follow. Raises SessionError for another."""
        ...

    def copy(self) -> Matcher:
        """The same state, to try out a continuation."""
        ...

    @property
    def may_end(self) -> bool:
        """Whether the answer may end here."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether nothing but the end may follow."""
        ...


class Candidates(Protocol):
    """Predictions for consecutive positions, as far as a choice needs them; arrays of one length."""

    @property
    def token_ids(self) -> np.ndarray: ...

    @property
    def confidences(self) -> np.ndarray: ...

    @property
    def topk_ids(self) -> np.ndarray | None: ...

    @property
    def topk_logprobs(self) -> np.ndarray | None: ...

    @property
    def logits(self) -> np.ndarray | None: ...


class Guide:
    """One row's matcher, and the forced tokens that are not appended yet.

    A forced run is always appended whole before the matcher is asked again, so the answer does not depend on
    how many tokens a step gives. `can_ask`: whether the graph can return logits; without, nothing but its
    top-k is chosen from. `most_masks`: those that the model was trained for; what further ones say is
    proposed, and not accepted by tau.
    """

    def __init__(
        self, matcher: Matcher, eos_ids: Collection[int], can_ask: bool, most_masks: int = 64
    ) -> None:
        self.matcher, self._can_ask, self.most_masks = matcher, can_ask, most_masks
        self._eos_ids = frozenset(eos_ids)
        self._queue: deque[int] = deque()
        self.begun = False
        self.wants_logits = False
        """Set once a choice needed them: from then on every step returns them."""

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow, and no token can say so."""
        return not self._queue and not self._eos_ids and self.matcher.is_over

    def forced(self) -> int | None:
        """The token that must come next, an end-of-sequence token included; None where there is a choice."""
        if not self._queue:
            self._queue.extend(self.matcher.forced())
        if self._queue:
            return self._queue[0]
        return min(self._eos_ids) if self._eos_ids and self.matcher.is_over else None

    def append(self, token: int) -> None:
        """`token` is part of the answer now: the forced one where there is one, else an allowed one."""
        if self._queue:
            assert token == self._queue[0], "a forced run is appended whole"
            self._queue.popleft()
        if token not in self._eos_ids:
            self.matcher.consume(token)

    def allowed(self) -> np.ndarray:
        """Bool [vocab]: what may follow where nothing is forced, end-of-sequence tokens included."""
        mask = self.matcher.mask().copy()
        for token in self._eos_ids:
            if token < len(mask):
                mask[token] = self.matcher.may_end
        return mask

    def choose(
        self, candidates: Candidates, i: int, config: GenerationConfig, seen: Sequence[int], strict: bool
    ) -> tuple[int, float] | None:
        """The constrained model's token for the next position, by prediction `i`, and the model's confidence.

        The likeliest allowed one, or with a temperature the one that is drawn among the allowed. None where
        another step must tell: prediction `i` has too little to choose from, or (not `strict`) is no longer
        what the model would say. Raises SessionError where no step of this graph could.
        """
        if config.needs_logits:
            assert candidates.logits is not None, "logits were not exported: the session checks this first"
            return choose(candidates.logits[i], config, seen, len(seen), self.allowed())
        token = int(candidates.token_ids[i])
        if _may_follow(self.matcher, token, self._eos_ids):
            return token, float(candidates.confidences[i])
        return self._best(candidates, i, self.allowed(), config.metric) if strict or i == 0 else None

    def _best(
        self, candidates: Candidates, i: int, allowed: np.ndarray, metric: str
    ) -> tuple[int, float] | None:
        if candidates.topk_ids is not None and candidates.topk_logprobs is not None:
            ids, logprobs = candidates.topk_ids[i], candidates.topk_logprobs[i]
            places = np.flatnonzero(allowed[ids])
            if len(places):
                at = int(places[0])
                own, top = float(np.exp(logprobs[at])), float(np.exp(logprobs[0]))
                other = {"probability": own, "margin": own - top}.get(
                    metric, float(candidates.confidences[i])
                )
                return int(ids[at]), other
        if candidates.logits is not None:
            logits = candidates.logits[i]
            token = int(np.where(allowed, logits, -np.inf).argmax())
            return token, confidence_of(logits, token, metric)
        if i == 0 and not self._can_ask:
            kept = "its top-k holds" if candidates.topk_ids is not None else "this bundle gives"
            raise SessionError(
                f"the grammar allows none of the tokens that {kept} at this position, and there are no logits"
                " to choose from; export the bundle with --logits",
                code="unsupported_by_model",
            )
        self.wants_logits = self.wants_logits or i == 0
        return None

    def lead(self, guess: Proposals, least: float = 0.0) -> Proposals:
        """The guess as far as the grammar allows it, with what it forces between and behind.

        Where the guess ends, what the grammar makes likely stands in. No more once less than `least` is left
        of the chance that all hold.
        """
        if self._queue:
            return guess
        matcher, at, chance = self.matcher.copy(), 0, 1.0
        token_ids: list[int] = []
        confidences: list[float] = []
        sure: list[int] = []

        def add(token: int, confidence: float) -> None:
            nonlocal at
            # Behind another token than was guessed the rest of the guess is void.
            at = at + 1 if at < len(guess) and guess.token_ids[at] == token else len(guess)
            token_ids.append(token)
            confidences.append(confidence)

        while len(token_ids) < MOST_LED:
            if forced := matcher.forced():
                for token in forced:
                    matcher.consume(token)
                    sure.append(len(token_ids))
                    add(token, 1.0)
                continue
            if matcher.is_over:
                if self._eos_ids:
                    sure.append(len(token_ids))
                    add(min(self._eos_ids), 1.0)
                break
            found = self._guessed(matcher, guess, at)
            if found is None or (chance := chance * found[1]) < least:
                break
            token, confidence = found
            add(token, confidence)
            if token in self._eos_ids:
                break
            matcher.consume(token)
        return Proposals(tuple(token_ids), tuple(confidences), guess.source, frozenset(sure))

    def _guessed(self, matcher: Matcher, guess: Proposals, at: int) -> tuple[int, float] | None:
        """A token for a choice: the guess where it is allowed, else what the grammar makes likely."""
        if at < len(guess):
            token = guess.token_ids[at]
            if _may_follow(matcher, token, self._eos_ids):
                return token, guess.confidences[at]
        likely = matcher.likely()
        return likely if likely is not None and likely[1] >= LIKELY else None


def _may_follow(matcher: Matcher, token: int, eos_ids: Collection[int]) -> bool:
    """Whether a token may come next where nothing is forced, one that ends included."""
    return matcher.may_end if token in eos_ids else matcher.allows(token)
