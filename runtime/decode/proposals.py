"""Guesses of the next tokens, to be verified by the next step: from masks or from the row's own text.

Knows where guesses come from and how often such guesses held; verifies nothing itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Literal, Protocol

Source = Literal["masks", "lookup"]

EDGES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 0.995)  # of confidences that are counted together
OWN_WORD = 16.0  # verified proposals that a confidence's own word counts for
FADE = 0.99  # what all counts keep at each step that verified: what is not fed any more gets another chance
KEEP = 0.75  # what an older step's masks count after a newer step's
FIRST = 0.5  # believed of masks before any were seen, as one mask
LOOKUP_CONFIDENCE = 0.6  # of a token that followed the same tokens before; the counts correct it


@dataclass(frozen=True, slots=True)
class Proposals:
    """Tokens for the positions behind a row's last known one. `confidences` are the source's, 0 to 1.

    `sure`: the places of those that hold wherever all before them do.
    """

    token_ids: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    source: Source = "masks"
    sure: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.token_ids)

    def num_sure(self, most: int) -> int:
        """How many of the first `most` are sure."""
        return sum(i < most for i in self.sure)


NONE = Proposals()


class Hopes:
    """How likely a proposal holds once all before it did: its confidence, corrected by how such ones did.

    Shared by the rows of a session, so that a new row starts with what earlier rows have shown.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[Source, int], tuple[float, float]] = {}

    def of(self, source: Source, confidence: float) -> float:
        """Between 0 and 1; NaN counts as 0."""
        confidence = confidence if confidence > 0 else 0.0
        tried, held = self._counts.get((source, bisect_right(EDGES, confidence)), (0.0, 0.0))
        return (held + OWN_WORD * min(confidence, 1.0)) / (tried + OWN_WORD)

    def of_all(self, proposals: Proposals) -> list[float]:
        """Of each, once all before it held."""
        return [
            1.0 if i in proposals.sure else self.of(proposals.source, confidence)
            for i, confidence in enumerate(proposals.confidences)
        ]

    def saw(self, proposals: Proposals, num_fed: int, num_held: int) -> None:
        """The first `num_held` of `num_fed` proposals held; behind the next one nothing was shown."""
        if num_fed == proposals.num_sure(num_fed):
            return
        counts = {key: (tried * FADE, held * FADE) for key, (tried, held) in self._counts.items()}
        for i in range(min(num_held + 1, num_fed)):
            if i in proposals.sure:
                continue
            confidence = proposals.confidences[i]
            key = (proposals.source, bisect_right(EDGES, confidence if confidence > 0 else 0.0))
            tried, held = counts.get(key, (0.0, 0.0))
            counts[key] = (tried + 1.0, held + (1.0 if i < num_held else 0.0))
        self._counts = counts  # put there whole: other threads' rows read it


class Foresight:
    """What the masks of one row are worth: for the first mask, the second, ..., how likely its proposal
    holds.

    Every mask of every step counts, by the hope that its confidence gives: nothing waits for a verification.
    """

    def __init__(self) -> None:
        self._seen: list[float] = []
        self._hoped: list[float] = []

    def saw(self, hopes: Sequence[float]) -> None:
        """A step's masks gave proposals of these hopes."""
        missing = len(hopes) - len(self._seen)
        self._seen += [0.0] * missing
        self._hoped += [0.0] * missing
        for k, hope in enumerate(hopes):
            self._seen[k] = self._seen[k] * KEEP + 1.0
            self._hoped[k] = self._hoped[k] * KEEP + hope

    def expected(self, most: int) -> list[float]:
        """Proposals that are expected to hold of 0, 1, ... `most` masks."""
        # In this order, and not with sum(), which some versions of Python round otherwise: C++ finds the
        # same.
        level = (reduce(add, self._hoped, 0.0) + FIRST) / (reduce(add, self._seen, 0.0) + 1.0)
        total, chance = [0.0], 1.0
        for k in range(most):
            seen, hoped = (self._seen[k], self._hoped[k]) if k < len(self._seen) else (0.0, 0.0)
            chance *= (hoped + level) / (seen + 1.0)
            total.append(total[-1] + chance)
        return total


class Proposer(Protocol):
    """Another source of proposals than a row's own masks."""

    def propose(self, tokens: Sequence[int], most: int) -> Proposals:
        """At most `most` proposals for what follows `tokens`."""
        ...


class Lookup:
    """Proposes what followed the last `length` tokens when they stood in the prompt or the answer before."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._after: dict[tuple[int, ...], int] = {}  # the position behind the latest such tokens
        self._indexed = 0

    def propose(self, tokens: Sequence[int], most: int) -> Proposals:
        # The last tokens themselves are not indexed yet: what is found stood before them.
        for end in range(max(self._indexed, self.length), len(tokens)):
            self._after[tuple(tokens[end - self.length : end])] = end
        self._indexed = max(self._indexed, len(tokens))
        at = self._after.get(tuple(tokens[-self.length :])) if len(tokens) >= self.length else None
        if at is None:
            return NONE
        token_ids = tuple(tokens[at : at + most])
        return Proposals(token_ids, (LOOKUP_CONFIDENCE,) * len(token_ids), "lookup")
