"""Matching stored grammars: automata over bytes with the token interface of llguidance's matcher.

LlgMatcher in runtime/structured/grammar.py drives both.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
from tokenizers import Tokenizer

from ..bundle.open import Bundle
from .automaton_file import read_automaton
from .catalog import find
from .grammar import Alphabet, LlgMatcher
from .regular.automaton import Automaton

MOST_OPEN = 16  # cached automata
MOST_MASKS = 4096  # cached masks of each automaton
LOOK_BACK = 4  # forced tokens at the end that a longer token may replace


class StoredGrammars:
    """The grammars of one bundle, each read at its first use. Thread-safe."""

    def __init__(self, bundle: Bundle, tokenizer: Tokenizer) -> None:
        self._bundle = bundle
        manifest = bundle.manifest
        self._vocabulary = VocabularyBytes(tokenizer, manifest.model.vocab_size)
        self._alphabet = Alphabet(self._vocabulary, manifest.model.vocab_size, manifest.tokens.eos)
        self._transitions = lru_cache(MOST_OPEN)(self._open)

    def matcher(self, name: str) -> LlgMatcher:
        """A matcher at the beginning of an answer. Raises SessionError for an unknown name and BundleError
        for a bad file.
        """
        file = find(self._bundle.manifest, name, self._bundle.path).file
        return LlgMatcher(AutomatonState(self._transitions(file)), self._alphabet)

    def _open(self, file: str) -> Transitions:
        return Transitions(read_automaton(self._bundle, file), self._vocabulary)


class VocabularyBytes:
    """The tokens of a tokenizer as bytes. Special tokens have none, since no answer may contain them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = _within_a_text(tokenizer)
        self.texts = _texts(tokenizer, vocab_size)
        pairs = sorted((text, token) for token, text in enumerate(self.texts) if text)
        self._sorted = [text for text, _ in pairs]
        self.longest = max(map(len, self._sorted), default=0)

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.texts[token] for token in tokens)

    def tokenize_bytes(self, data: bytes) -> list[int]:
        """The tokens of a text by the tokenizer; bytes that are not UTF-8 become the longest
        tokens that fit.
        """
        tokens: list[int] = []
        while data:
            try:
                data.decode("utf-8")
                good = len(data)
            except UnicodeDecodeError as error:
                good = error.start
            if good:
                tokens += self._tokenizer.encode(data[:good].decode("utf-8"), add_special_tokens=False).ids
            bad = good
            while bad < len(data) and not _begins_well(data[bad:]):
                bad += 1
            tokens += self._greedy(data[good:bad])
            data = data[bad:]
        return tokens

    def extensions(self, data: bytes) -> list[bytes]:
        """The rests of the longer tokens that begin with `data`."""
        at, rests = bisect_left(self._sorted, data), []
        while at < len(self._sorted) and self._sorted[at].startswith(data):
            if len(self._sorted[at]) > len(data):
                rests.append(self._sorted[at][len(data) :])
            at += 1
        return rests

    def _greedy(self, data: bytes) -> list[int]:
        tokens = []
        while data:
            prefixes = [data[:size] for size in range(min(len(data), self.longest), 0, -1)]
            token = next((self._first[text] for text in prefixes if text in self._first), None)
            if token is None:
                data = data[1:]  # no token has this byte
                continue
            tokens.append(token)
            data = data[len(self.texts[token]) :]
        return tokens

    @cached_property
    def _first(self) -> dict[bytes, int]:
        """The first token of each text."""
        return {text: token for token, text in reversed(list(enumerate(self.texts))) if text}

    @cached_property
    def rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The ids, the lengths and the bytes [tokens, longest] of all tokens with a text, by length."""
        tokens = sorted((t for t, text in enumerate(self.texts) if text), key=lambda t: len(self.texts[t]))
        lengths = np.array([len(self.texts[token]) for token in tokens], np.int64)
        padded = np.zeros((len(tokens), self.longest), np.uint8)
        for i, token in enumerate(tokens):
            padded[i, : lengths[i]] = np.frombuffer(self.texts[token], np.uint8)
        return np.array(tokens, np.int64), lengths, padded


class Transitions:
    """An automaton over one vocabulary: the masks and the forced tokens of its states, shared by
    all answers.
    """

    def __init__(self, automaton: Automaton, vocabulary: VocabularyBytes) -> None:
        self.automaton, self.vocabulary = automaton, vocabulary
        edges = [(state, *edge) for state, out in enumerate(automaton.edges) for edge in out]
        table = np.array(edges, np.int64).reshape(-1, 4)
        self._keys = table[:, 0] * 256 + table[:, 1]
        self._last, self._targets = table[:, 0] * 256 + table[:, 2], table[:, 3]
        self.bits = lru_cache(MOST_MASKS)(self._bits)
        self.forced_tokens = lru_cache(MOST_MASKS)(self._forced_tokens)

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
        """The forced bytes as tokens. They are tokenized with the token `last` before them, if
        that keeps it.
        """
        data, end = self.forced(state)
        tokens: list[int] = []
        if data and last is not None:
            tokens = self.vocabulary.tokenize_bytes(self.vocabulary.texts[last] + data)
            tokens = tokens[1:] if tokens[:1] == [last] else []
        if data:
            tokens = self._chopped(tokens or self.vocabulary.tokenize_bytes(data), end)
        return tuple(tokens)

    def _chopped(self, tokens: list[int], state: int) -> list[int]:
        """`tokens` without those at the end that a longer token may replace; `state` follows them."""
        vocabulary = self.vocabulary
        end = vocabulary.decode_bytes(tokens[-LOOK_BACK:])[-vocabulary.longest :]
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


def _begins_well(data: bytes) -> bool:
    """Whether `data` begins with a whole character."""
    try:
        data[:4].decode("utf-8")
        return True
    except UnicodeDecodeError as error:
        return error.start > 0


def _within_a_text(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer for text in the middle of an answer: it puts no space before it."""
    parsed = json.loads(tokenizer.to_str())
    parts = [parsed.get("normalizer"), parsed.get("pre_tokenizer")]
    for part in parts:
        if part is None:
            continue
        parts += part.get("normalizers", []) + part.get("pretokenizers", [])
        if "normalizers" in part:
            part["normalizers"] = [step for step in part["normalizers"] if step["type"] != "Prepend"]
        if part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"
    if (parsed.get("normalizer") or {}).get("type") == "Prepend":
        parsed["normalizer"] = None
    return Tokenizer.from_str(json.dumps(parsed))


def _texts(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """The bytes that each token adds to a text."""
    parsed = json.loads(tokenizer.to_str())
    special = {token["id"] for token in parsed["added_tokens"] if token["special"]}
    added = {token["id"] for token in parsed["added_tokens"]}
    falls_back = parsed["model"].get("byte_fallback", False)
    characters = _byte_characters()
    texts = [b""] * vocab_size
    for written, token in tokenizer.get_vocab(with_added_tokens=True).items():
        if token in special or token >= vocab_size:
            continue
        if token in added:
            texts[token] = written.encode("utf-8")
        elif not falls_back:
            is_coded = all(character in characters for character in written)
            texts[token] = bytes(characters[c] for c in written) if is_coded else written.encode("utf-8")
        elif len(written) == 6 and written.startswith("<0x") and written.endswith(">"):
            texts[token] = bytes([int(written[3:5], 16)])
        else:
            texts[token] = written.replace("\u2581", " ").encode("utf-8")
    return texts


def _byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
