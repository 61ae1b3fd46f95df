"""Stored grammars: automata over bytes, with the methods of llguidance's matcher."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from .regular.automaton import Automaton
from .vocabulary import Vocabulary

MAX_CACHED, MASK_BYTES = 4096, 8 << 20  # results of each kind for an automaton; bytes of its masks
LOOK_BACK = 4  # forced tokens at the end that a longer token may replace


class Transitions:
    """An automaton over one vocabulary: masks and forced tokens of its states, shared by all answers."""

    def __init__(self, automaton: Automaton, vocabulary: Vocabulary) -> None:
        self.automaton, self.vocabulary = automaton, vocabulary
        edges = [(state, *edge) for state, out in enumerate(automaton.edges) for edge in out]
        table = np.array(edges, np.int64).reshape(-1, 4)
        self._keys = table[:, 0] * 256 + table[:, 1]
        self._last, self._targets = table[:, 0] * 256 + table[:, 2], table[:, 3]
        most_masks = MASK_BYTES // (len(vocabulary.texts) // 8 + 1)
        self.bits = lru_cache(max(1, min(MAX_CACHED, most_masks)))(self._bits)
        self.forced_tokens = lru_cache(MAX_CACHED)(self._forced_tokens)

    def _bits(self, state: int) -> bytes:
        """The mask of the tokens that may follow, one bit for each, the lowest first."""
        mask = np.zeros(len(self.vocabulary.texts), bool)
        mask[self._allowed(state)] = True
        return np.packbits(mask, bitorder="little").tobytes()

    def _allowed(self, state: int) -> np.ndarray:
        tokens, lengths, padded = self.vocabulary.rows
        alive = np.arange(len(tokens))
        states = np.full(len(tokens), state, np.int64)
        allowed = []
        for i in range(self.vocabulary.longest):
            keys = states * 256 + padded[alive, i]
            at = np.searchsorted(self._keys, keys, "right") - 1
            good = (at >= 0) & (self._last[at] >= keys) if len(self._keys) else np.zeros(len(keys), bool)
            alive, states = alive[good], self._targets[at[good]] if len(self._keys) else states[good]
            is_whole = lengths[alive] == i + 1
            allowed.append(tokens[alive[is_whole]])
            alive, states = alive[~is_whole], states[~is_whole]
            if not len(alive):
                break
        return np.concatenate(allowed) if allowed else np.zeros(0, np.int64)

    def forced(self, state: int) -> tuple[bytes, int]:
        """The bytes that must follow, and the state after them."""
        data = bytearray()
        while (only := self.automaton.only(state)) is not None:
            data.append(only[0])
            state = only[1]
        return bytes(data), state

    def _forced_tokens(self, state: int, last: int | None) -> tuple[int, ...]:
        """The forced bytes as tokens, tokenized with the token `last` before them if that keeps it."""
        data, end = self.forced(state)
        tokens: list[int] = []
        if data and last is not None:
            tokens = self.vocabulary.write(self.vocabulary.texts[last] + data)
            tokens = tokens[1:] if tokens[:1] == [last] else []
        if data:
            tokens = self._chopped(tokens or self.vocabulary.write(data), end)
        return tuple(tokens)

    def _chopped(self, tokens: list[int], state: int) -> list[int]:
        """`tokens` without those at the end that a longer token may replace; `state` follows them."""
        vocabulary = self.vocabulary
        end = b"".join(vocabulary.texts[token] for token in tokens[-LOOK_BACK:])[-vocabulary.longest :]
        for i in range(len(end)):
            rests = vocabulary.extensions(end[i:])
            if any(self.automaton.walk(rest, state) is not None for rest in rests):
                length = 0
                for num, token in enumerate(reversed(tokens), 1):
                    length += len(vocabulary.texts[token])
                    if length >= len(end) - i:
                        return tokens[:-num]
        return tokens


class AutomatonState:
    """The state of one answer in an automaton, with the methods of llguidance's matcher."""

    __slots__ = ("_last", "_state", "_transitions")

    def __init__(self, transitions: Transitions, state: int = 0, last: int | None = None) -> None:
        self._transitions, self._state, self._last = transitions, state, last

    def compute_ff_bytes(self) -> bytes:
        return self._transitions.forced(self._state)[0]

    def compute_ff_tokens(self) -> list[int]:
        """The forced bytes as tokens, without those at the end that a longer token may replace."""
        return list(self._transitions.forced_tokens(self._state, self._last))

    def compute_bitmask(self) -> bytes:
        return self._transitions.bits(self._state)

    def consume_token(self, token: int) -> bool:
        state = self._transitions.automaton.walk(
            self._transitions.vocabulary.texts[token] or b"\xff", self._state
        )
        if state is None:
            return False
        self._state, self._last = state, token
        return True

    def validate_tokens(self, tokens: Sequence[int]) -> int:
        """The number of tokens, from the first, that may follow."""
        probe = self.deep_copy()
        return next((i for i, token in enumerate(tokens) if not probe.consume_token(token)), len(tokens))

    def deep_copy(self) -> AutomatonState:
        return AutomatonState(self._transitions, self._state, self._last)

    def is_accepting(self) -> bool:
        return self._state in self._transitions.automaton.ends

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        return ""
