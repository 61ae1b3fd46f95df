"""The tokens of a tokenizer as bytes, and bytes as tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ..errors import SessionError, no_panic

PER_BYTE = 4  # continuations tried for each first byte
CACHED_TEXTS = 1024  # texts whose tokens and continuations are cached
MAX_CACHED_BYTES = 1024  # of a text whose tokens are cached
INSTALL = "pip install 'mars-export[grammar]'"


@dataclass(frozen=True, slots=True)
class Retokenizations:
    """Tokenizations of a text before different continuations.

    `common` are the tokens that all begin with, `first` the first tokens by frequency, `share` the share of
    the most frequent of them.
    """

    common: tuple[int, ...]
    first: tuple[int, ...]
    share: float

    @classmethod
    def of(cls, variants: Sequence[Sequence[int]]) -> Retokenizations:
        counts = Counter(variant[0] for variant in variants)
        first = sorted(counts, key=lambda token: (-counts[token], token))
        common = next(iter(variants), ())
        for variant in variants:
            common = common[: num_alike(common, variant)]
        return cls(tuple(common), tuple(first), counts[first[0]] / len(variants) if first else 0.0)


class Vocabulary:
    """The tokens of a model with `size` tokens, padding included; `eos_ids` end its sequences.

    library: the llguidance package
    tokenizer: its tokenizer
    texts: the bytes of each token; special tokens and padding have none, since no answer may contain them.
        Other added tokens, such as Qwen's <tool_call>, are ordinary text

    Raises SessionError if llguidance is missing or cannot use the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: Sequence[int]) -> None:
        self.library = _import()
        self.size, self.eos_ids = size, list(eos_ids)
        special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        known = set(tokenizer.get_vocab(with_added_tokens=True).values()) - special
        what = "the grammar library cannot use the bundle's tokenizer"
        with no_panic(SessionError, what, "export the bundle again"):
            new: Any = partial(self.library.LLTokenizer, n_vocab=size, eos_token=self.eos_ids or None)
            self.tokenizer: Any = new(tokenizer.to_str())
            self.texts = [self.tokenizer.decode_bytes([i]) if i in known else b"" for i in range(size)]
            # The library takes added tokens in angle brackets for special ones.
            if any(i < size and self.tokenizer.is_special_token(i) for i in known.difference(self.eos_ids)):
                plain = _PlainTokenizer(tokenizer, self.texts, self.eos_ids)
                self.tokenizer = new(self.library.TokenizerWrapper(plain))
        # All tokens by first byte and length; and for each, the index of the first token with its first byte.
        texts = self.texts
        order = sorted(range(size), key=lambda token: (texts[token][:1], len(texts[token]), texts[token]))
        begins = [i == 0 or texts[order[i - 1]][:1] != texts[order[i]][:1] for i in range(size)]
        self._shortest = np.array(order, np.int64)
        self._first = np.maximum.accumulate(np.where(begins, np.arange(size), 0))
        self._cached_tokens = lru_cache(CACHED_TEXTS)(self._tokens)
        self._cached_retokenizations = lru_cache(CACHED_TEXTS)(self._retokenizations)

    def write(self, data: bytes) -> list[int]:
        """The tokens of a text; bytes that are not UTF-8 become the longest tokens that fit."""
        return list((self._cached_tokens if len(data) <= MAX_CACHED_BYTES else self._tokens)(data))

    def _tokens(self, data: bytes) -> tuple[int, ...]:
        return tuple(self.tokenizer.tokenize_bytes(data))

    def beginnings(self, data: bytes) -> list[int]:
        """The tokens that `data` may begin with, the longest first."""
        fits = [token for token, text in enumerate(self.texts) if text and data.startswith(text)]
        return sorted(fits, key=lambda token: -len(self.texts[token]))

    def retokenizations(self, data: bytes, after: np.ndarray) -> Retokenizations:
        """Tokenizations of `data` before tokens of the mask `after`, trying a few for each first byte."""
        return self._cached_retokenizations(data, np.packbits(after).tobytes())

    def _retokenizations(self, data: bytes, packed: bytes) -> Retokenizations:
        after = np.unpackbits(np.frombuffer(packed, np.uint8))[: self.size].view(bool)
        fits = after[self._shortest]
        before = np.cumsum(fits) - fits  # fitting tokens before each one
        few = self._shortest[fits & (before - before[self._first] < PER_BYTE)]
        return Retokenizations.of([self.write(data + self.texts[token]) for token in few.tolist()])


class _PlainTokenizer:
    """A tokenizer for the library whose only special tokens are those without a text."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[bytes], eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_ids[0] if eos_ids else 0
        self.special_token_ids = [i for i, text in enumerate(texts) if not text]
        self.tokens = [text or f"<[{i}]>".encode() for i, text in enumerate(texts)]

    def __call__(self, data: bytes) -> list[int]:
        return list(self._tokenizer.encode(data.decode(), add_special_tokens=False).ids)


def num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def words_of(message: str) -> str:
    """The part of a library message that concerns the grammar, shortened."""
    words = " ".join(message.replace("<non-verbose/>", "").split())[:300]
    return "nothing satisfies it" if words == "NoExtensionBias" else words


def _import() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise SessionError(f"schema, regex, choice, tools and grammar need llguidance; {INSTALL}") from error
    return llguidance
