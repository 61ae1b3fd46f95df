"""Draft tokens: predicted next tokens that the next step verifies. They come from masks or from a lookup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Source = Literal["masks", "prompt_lookup"]

MAX_LOOKUP = 32  # tokens of one lookup: about as wide as the widest step whose cost is measured
LOOKUP_CONFIDENCE = 0.6  # of a token that followed the same tokens before; AcceptanceRates corrects it


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
