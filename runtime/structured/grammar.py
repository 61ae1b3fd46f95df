"""Matchers over tokens for schemas, regular expressions, choices and tools, compiled by llguidance."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

import numpy as np

from ..decode.config import GenerationConfig
from ..errors import SessionError
from ..text import toolcalls

PER_BYTE = 4  # continuations tried for each first byte
SEPARATORS = (", ", ": ")
MOST_SETTLED = 256  # tokens forced at once; more follow in the next run
CACHED_TEXTS = 1024  # texts whose tokens and continuations are cached
MOST_CACHED_BYTES = 1024  # of a text whose tokens are cached
CACHED_GRAMMARS = 64  # compiled grammars of a session
INSTALL = "pip install 'mars-export[grammar]'"
# They bound compilation to about a second and 300 MB, and a step to tens of milliseconds.
LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 300_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
MOST_CERTAIN = 4096  # tokens; a longer text counts as a choice even if all of it is forced
SIMPLER = "make the schema, regex or tools simpler"


class Grammars:
    """The grammars of one tokenizer, each compiled once and cached. Thread-safe.

    tokenizer: JSON text of the tokenizers library
    vocab_size: tokens of the model, padding included
    eos_ids: end-of-sequence tokens of the model
    dialect: how the model writes calls
    separators: of JSON answers, unless a request has its own

    Raises SessionError if llguidance is missing or cannot use the tokenizer.
    """

    def __init__(
        self,
        tokenizer: str,
        vocab_size: int,
        eos_ids: Sequence[int],
        dialect: toolcalls.Dialect,
        separators: tuple[str, str] = SEPARATORS,
    ) -> None:
        self._library = _import()
        self._dialect, self._separators = dialect, separators
        with _no_panic("the grammar library cannot use the bundle's tokenizer", "export the bundle again"):
            self._tokenizer = self._library.LLTokenizer(
                tokenizer, n_vocab=vocab_size, eos_token=list(eos_ids) or None
            )
            self._alphabet = Alphabet(self._tokenizer, vocab_size, eos_ids)
        self._limits = self._library.LLParserLimits(**LIMITS)
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, config: GenerationConfig) -> LlgMatcher:
        """A matcher at the beginning of an answer. Raises SessionError if no answer satisfies the grammar."""
        parts = [config.schema, config.regex, config.choice, config.tools, self._separators_of(config)]
        key = sha256(json.dumps(parts).encode("utf-8", "surrogatepass")).hexdigest()
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._of(self._compiled[key].deep_copy())
        compiled = self._compile(config)
        with self._lock:
            self._compiled[key] = compiled
            while len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return self._of(compiled.deep_copy())

    def _separators_of(self, config: GenerationConfig) -> tuple[str, str]:
        return self._separators if config.separators is None else config.separators

    def _of(self, matcher: Any) -> LlgMatcher:
        return LlgMatcher(matcher, self._alphabet)

    def _compile(self, config: GenerationConfig) -> Any:
        with _no_panic("the grammar cannot be compiled", SIMPLER):
            grammar = self._grammar(config)
            compiled = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if compiled.is_error():
            raise SessionError(f"the grammar cannot be compiled ({_words(compiled.get_error())}); {SIMPLER}")
        first = self._of(compiled.deep_copy())
        if not first.forced():
            first.mask()  # raises if nothing satisfies the grammar
        return compiled

    def _grammar(self, config: GenerationConfig) -> str:
        library, (item, key) = self._library.LLMatcher, self._separators_of(config)
        options = {"item_separator": item, "key_separator": key, "whitespace_flexible": False}
        if config.regex is not None:
            return str(library.grammar_from_regex(config.regex))
        if config.choice is not None:
            return str(library.grammar_from_regex("|".join(map(_escaped, dict.fromkeys(config.choice)))))
        if config.schema is not None:
            if config.schema == "false":
                raise SessionError("the schema `false` allows no answer; use another one")
            schema = "{}" if config.schema == "true" else config.schema
            return str(library.grammar_from_json_schema(schema, overrides=options))
        assert isinstance(config.tools, str), "a config holds tools as JSON text"
        tools = json.loads(config.tools)
        if self._dialect == "list":
            return str(library.grammar_from_json_schema(toolcalls.list_schema(tools), overrides=options))
        return str(self._library.StructTag.to_grammar([*self._tags(tools, options)], assume_special=False))

    def _tags(self, tools: Sequence[dict[str, Any]], options: dict[str, Any]) -> Iterator[Any]:
        item, key = options["item_separator"], options["key_separator"]
        for tool in tools:
            name = json.dumps(tool["function"]["name"], ensure_ascii=False)
            yield self._library.StructTag(
                trigger=toolcalls.OPEN,
                begin=f'{toolcalls.OPEN}\n{{"name"{key}{name}{item}"arguments"{key}',
                grammar=toolcalls.parameters(tool) | {"x-guidance": options},
                end=f"}}\n{toolcalls.CLOSE}",
            )


class Alphabet:
    """The tokens of a tokenizer as bytes, and bytes as tokens."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.vocab_size, self.ends = vocab_size, list(eos_ids)
        self._tokenizer = tokenizer
        self._texts = [tokenizer.decode_bytes([token]) for token in range(vocab_size)]
        # All tokens by first byte and length; and for each, the index of the first token with its first byte.
        texts = self._texts
        order = sorted(
            range(vocab_size), key=lambda token: (texts[token][:1], len(texts[token]), texts[token])
        )
        begins = [i == 0 or texts[order[i - 1]][:1] != texts[order[i]][:1] for i in range(vocab_size)]
        self._shortest = np.array(order, np.int64)
        self._first = np.maximum.accumulate(np.where(begins, np.arange(vocab_size), 0))
        self._cached_tokens = lru_cache(CACHED_TEXTS)(self._tokens)
        self._cached_ways = lru_cache(CACHED_TEXTS)(self._ways)

    def write(self, data: bytes) -> list[int]:
        """The tokens of a text."""
        return list((self._cached_tokens if len(data) <= MOST_CACHED_BYTES else self._tokens)(data))

    def _tokens(self, data: bytes) -> tuple[int, ...]:
        return tuple(self._tokenizer.tokenize_bytes(data))

    def beginnings(self, data: bytes) -> list[int]:
        """The tokens that `data` may begin with, the longest first."""
        fits = [token for token, text in enumerate(self._texts) if text and data.startswith(text)]
        return sorted(fits, key=lambda token: -len(self._texts[token]))

    def ways(self, data: bytes, after: np.ndarray) -> Ways:
        """The tokenizations of `data` before tokens of the mask `after`, of which a few for each first byte
        are tried.
        """
        return self._cached_ways(data, np.packbits(after).tobytes())

    def _ways(self, data: bytes, packed: bytes) -> Ways:
        after = np.unpackbits(np.frombuffer(packed, np.uint8))[: self.vocab_size].view(bool)
        fits = after[self._shortest]
        before = np.cumsum(fits) - fits  # fitting tokens before each one
        few = self._shortest[fits & (before - before[self._first] < PER_BYTE)]
        return Ways.of([self.write(data + self._texts[token]) for token in few.tolist()])


@dataclass(frozen=True, slots=True)
class Ways:
    """Tokenizations of a text before different continuations.

    `common` are the tokens that all begin with, `first` the first tokens by frequency, `share` the share of
    the most frequent of them.
    """

    common: tuple[int, ...]
    first: tuple[int, ...]
    share: float

    @classmethod
    def of(cls, variants: Sequence[Sequence[int]]) -> Ways:
        counts = Counter(variant[0] for variant in variants)
        first = sorted(counts, key=lambda token: (-counts[token], token))
        common = next(iter(variants), ())
        for variant in variants:
            common = common[: _num_alike(common, variant)]
        return cls(tuple(common), tuple(first), counts[first[0]] / len(variants) if first else 0.0)


class LlgMatcher:
    """The state of one answer in a compiled grammar: the Matcher of runtime/structured/guide.py."""

    __slots__ = ("_alphabet", "_forced", "_mask", "_matcher")

    def __init__(self, matcher: Any, alphabet: Alphabet) -> None:
        self._matcher, self._alphabet = matcher, alphabet
        self._mask: np.ndarray | None = None
        self._forced: list[int] | None = None

    def forced(self) -> list[int]:
        """The tokens that must follow; none if there is a choice, or if only the end may follow."""
        if self._forced is None:
            forced: list[int] = self._matcher.compute_ff_tokens()
            self._check()
            self._forced = self._settled(forced) if forced else []
        return self._forced

    def mask(self) -> np.ndarray:
        """Bool [vocab]: the tokens that may follow, without end-of-sequence tokens."""
        if self._mask is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            self._check()
            mask = np.unpackbits(bits, bitorder="little")[: self._alphabet.vocab_size].view(bool)
            mask[self._alphabet.ends] = False
            if not mask.any() and not self.may_end:
                raise SessionError(f"the answer so far cannot be continued under the grammar; {SIMPLER}")
            self._mask = mask
        return self._mask

    def allows(self, token: int) -> bool:
        """Whether a token may follow. The mask is used if it is known, since one token is faster to check."""
        if not 0 <= token < self._alphabet.vocab_size or token in self._alphabet.ends:
            return False
        if self._mask is not None:
            return bool(self._mask[token])
        is_allowed: bool = self._matcher.validate_tokens([token]) == 1
        self._check()
        return is_allowed

    def likely(self) -> tuple[int, float] | None:
        """Of the tokenizations of forced text: the most frequent first token, and its share."""
        data = bytes(self._matcher.compute_ff_bytes())
        self._check()
        if not data or len(data) > 16 * MOST_SETTLED:
            return None
        after = self._after(data)
        if after is None or after.is_over:
            return None
        ways = self._alphabet.ways(data, after.mask())
        return (ways.first[0], ways.share) if ways.first and self.allows(ways.first[0]) else None

    def consume(self, token: int) -> None:
        self._mask = self._forced = None
        if not self._matcher.consume_token(token):
            self._check()
            raise SessionError(f"the grammar does not allow token {token} here")

    def copy(self) -> LlgMatcher:
        other = LlgMatcher(self._matcher.deep_copy(), self._alphabet)
        other._mask, other._forced = self._mask, self._forced  # both are read only
        return other

    @property
    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def is_over(self) -> bool:
        return self.may_end and not self.mask().any()

    def _settled(self, forced: list[int]) -> list[int]:
        """The forced tokens that do not depend on the text after them. Others become the only ones of the
        mask.

        llguidance leaves out a last token that another could extend. With byte-pair encoding, the text after
        forced tokens can move their ends: `"}}` is `"` and `}}`, but before a comma it is `"}` and `},`.
        """
        if len(forced) > MOST_SETTLED:
            return forced[:MOST_SETTLED]
        data = bytes(self._matcher.compute_ff_bytes())
        if (num := self._matcher.validate_tokens(forced)) < len(forced):
            # The text of a special token, such as <|mask|>, becomes the longest plain tokens.
            return forced[:num] or self._longest(data)
        if len(data) > 16 * MOST_SETTLED:
            return forced
        after = self._after(data)
        if after is None:
            return forced
        if after.is_over:
            return self._alphabet.write(data)
        ways = self._alphabet.ways(data, after.mask())
        num = _num_alike(forced, ways.common)
        if num == 0:
            allowed = [token for token in ways.first if self._matcher.validate_tokens([token]) == 1]
            if not allowed:
                return forced
            self._mask = np.zeros(self._alphabet.vocab_size, bool)
            self._mask[allowed] = True
        return forced[:num]

    def _after(self, data: bytes) -> LlgMatcher | None:
        """A matcher after the tokens of `data`, or None if they are not allowed."""
        after = LlgMatcher(self._matcher.deep_copy(), self._alphabet)
        tokens = self._alphabet.write(data)
        return after if all(after._matcher.consume_token(token) for token in tokens) else None

    def _longest(self, data: bytes) -> list[int]:
        fits = self._alphabet.beginnings(data)
        return next(([token] for token in fits if self._matcher.validate_tokens([token]) == 1), [])

    def _check(self) -> None:
        if self._matcher.is_error():
            raise SessionError(f"the grammar failed ({_words(self._matcher.get_error())}); {SIMPLER}")


def leaves_a_choice(matcher: LlgMatcher) -> bool:
    """Whether more than one text satisfies the grammar."""
    matcher, left = matcher.copy(), MOST_CERTAIN
    while (forced := matcher.forced()) and left > 0:
        left -= len(forced)
        for token in forced:
            matcher.consume(token)
    return left <= 0 or not matcher.is_over


def _num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/")


def _words(message: str) -> str:
    """The part of a library message that concerns the grammar, shortened."""
    words = " ".join(message.replace("<non-verbose/>", "").split())[:300]
    return "nothing satisfies it" if words == "NoExtensionBias" else words


@contextmanager
def _no_panic(what: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit, SessionError):
        raise
    except BaseException as error:  # a panic of the Rust library is not an Exception
        raise SessionError(f"{what} ({_words(str(error) or type(error).__name__)}); {remedy}") from error


def _import() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise SessionError(f"schema, regex, choice and tools need llguidance; {INSTALL}") from error
    return llguidance
