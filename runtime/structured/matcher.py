"""The tokens that a grammar allows next, the token that it forces, and the likely one."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import SessionError
from .vocabulary import Vocabulary, num_alike, words_of

MAX_SETTLED = 256  # tokens forced at once; more follow in the next run
MAX_CERTAIN = 4096  # tokens; a longer text counts as a choice even if all of it is forced
SIMPLER = "correct the schema, regex or tools, or make them simpler"


class TokenMatcher:
    """The state of one answer in a grammar, llguidance's `state`. The end of the answer is not a token."""

    __slots__ = ("_forced", "_mask", "_state", "_vocabulary")

    def __init__(self, state: Any, vocabulary: Vocabulary) -> None:
        self._state, self._vocabulary = state, vocabulary
        self._mask: np.ndarray | None = None
        self._forced: list[int] | None = None

    def forced(self) -> list[int]:
        """The tokens that must follow; none if there is a choice, or if only the end may follow."""
        if self._forced is None:
            forced: list[int] = self._state.compute_ff_tokens()
            self._check()
            self._forced = self._settled(forced) if forced else []
        return self._forced

    def mask(self) -> np.ndarray:
        """Bool [vocab]: the tokens that may follow, without end-of-sequence tokens."""
        if self._mask is None:
            bits = np.frombuffer(self._state.compute_bitmask(), np.uint8)
            self._check()
            mask = np.unpackbits(bits, bitorder="little")[: self._vocabulary.size].view(bool)
            mask[self._vocabulary.eos_ids] = False
            if not mask.any() and not self.may_end:
                raise SessionError(f"the answer so far cannot be continued under the grammar; {SIMPLER}")
            self._mask = mask
        return self._mask

    def allows(self, token: int) -> bool:
        """Whether a token may follow. The mask is used if it is known, since one token is faster to check."""
        if not 0 <= token < self._vocabulary.size or token in self._vocabulary.eos_ids:
            return False
        if self._mask is not None:
            return bool(self._mask[token])
        is_allowed: bool = self._state.validate_tokens([token]) == 1
        self._check()
        return is_allowed

    def likely(self) -> tuple[int, float] | None:
        """The most frequent first token of the tokenizations of forced text, and its share."""
        data = bytes(self._state.compute_ff_bytes())
        self._check()
        if not data or len(data) > 16 * MAX_SETTLED:
            return None
        after = self._after(data)
        if after is None or after.is_over:
            return None
        retokenizations = self._vocabulary.retokenizations(data, after.mask())
        return (
            (retokenizations.first[0], retokenizations.share)
            if retokenizations.first and self.allows(retokenizations.first[0])
            else None
        )

    def consume(self, token: int) -> None:
        self._mask = self._forced = None
        if not self._state.consume_token(token):
            self._check()
            raise SessionError(f"the grammar does not allow token {token} here")

    def copy(self) -> TokenMatcher:
        other = TokenMatcher(self._state.deep_copy(), self._vocabulary)
        other._mask, other._forced = self._mask, self._forced  # both are read only
        return other

    @property
    def may_end(self) -> bool:
        return bool(self._state.is_accepting())

    @property
    def is_over(self) -> bool:
        return self.may_end and not self.mask().any()

    def _settled(self, forced: list[int]) -> list[int]:
        """The forced tokens that do not depend on the text after them. Others become the mask's only ones.

        llguidance leaves out a last token that another could extend. With byte-pair encoding, the text after
        forced tokens can move their ends: `"}}` is `"` and `}}`, but before a comma it is `"}` and `},`.
        """
        if len(forced) > MAX_SETTLED:
            return forced[:MAX_SETTLED]
        data = bytes(self._state.compute_ff_bytes())
        if (num := self._state.validate_tokens(forced)) < len(forced):
            # The text of a special token, such as <|mask|>, becomes the longest plain tokens.
            return forced[:num] or self._longest(data)
        if len(data) > 16 * MAX_SETTLED:
            return forced
        after = self._after(data)
        if after is None:
            return forced
        if after.is_over:
            return self._vocabulary.write(data)
        retokenizations = self._vocabulary.retokenizations(data, after.mask())
        num = num_alike(forced, retokenizations.common)
        if num == 0:
            allowed = [token for token in retokenizations.first if self._state.validate_tokens([token]) == 1]
            if not allowed:
                return forced
            self._mask = np.zeros(self._vocabulary.size, bool)
            self._mask[allowed] = True
        return forced[:num]

    def _after(self, data: bytes) -> TokenMatcher | None:
        """A matcher after the tokens of `data`, or None if they are not allowed."""
        after = TokenMatcher(self._state.deep_copy(), self._vocabulary)
        tokens = self._vocabulary.write(data)
        return after if all(after._state.consume_token(token) for token in tokens) else None

    def _longest(self, data: bytes) -> list[int]:
        fits = self._vocabulary.beginnings(data)
        return next(([token] for token in fits if self._state.validate_tokens([token]) == 1), [])

    def _check(self) -> None:
        if self._state.is_error():
            raise SessionError(f"the grammar failed ({words_of(self._state.get_error())}); {SIMPLER}")


def leaves_a_choice(matcher: TokenMatcher) -> bool:
    """Whether more than one text satisfies the grammar."""
    matcher, left = matcher.copy(), MAX_CERTAIN
    while (forced := matcher.forced()) and left > 0:
        left -= len(forced)
        for token in forced:
            matcher.consume(token)
    return left <= 0 or not matcher.is_over
