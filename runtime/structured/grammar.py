"""What a request asks of the form of its answer, as a matcher over tokens.

The only file that names llguidance. Knows schemas, regular expressions, choices and tools; nothing of rows,
of steps or of the model.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from ..decode.config import GenerationConfig
from ..errors import SessionError
from ..text import toolcalls

PER_BYTE = 4  # continuations that begin with the same byte, of those that are tried
SEPARATORS = (", ", ": ")
MOST_SETTLED = 256  # tokens that are forced at once; more follow in the next run
REMEMBERED = 1024  # texts whose continuations were tried
MOST_KEPT = 1024  # bytes of a text whose tokens are kept
CACHED = 64  # compiled grammars of a session
INSTALL = "pip install 'mars-export[grammar]'"
# Bounds of time and memory: about a second to compile and 300 MB, tens of milliseconds for a step.
LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 300_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
MOST_CERTAIN = 4096  # tokens: a longer text that is forced from end to end counts as a choice
SIMPLER = "make the schema, regex or tools simpler"


class Grammars:
    """The grammars of one tokenizer, each compiled once and kept while it is asked for.

    tokenizer: JSON text of the tokenizers library. vocab_size: tokens of the model, padding included.
    eos_ids: the model's own, which a tokenizer file does not tell. dialect: how the model writes calls.
    separators: those of JSON answers where a request names none. May be used from several threads. Raises
    SessionError where llguidance is missing or cannot use the tokenizer.
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
        """A matcher at the beginning of an answer. Raises SessionError for what nothing can satisfy."""
        parts = [config.schema, config.regex, config.choice, config.tools, self._separators_of(config)]
        key = sha256(json.dumps(parts).encode("utf-8", "surrogatepass")).hexdigest()
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._of(self._compiled[key].deep_copy())
        compiled = self._compile(config)
        with self._lock:
            self._compiled[key] = compiled
            while len(self._compiled) > CACHED:
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
            first.mask()  # what nothing satisfies is refused before it runs
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
                raise SessionError("the schema false allows no answer; give another")
            schema = "{}" if config.schema == "true" else config.schema
            return str(library.grammar_from_json_schema(schema, overrides=options))
        assert isinstance(config.tools, str), "a config says what is asked for, and holds JSON text"
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
    """A tokenizer as the grammar library has it: tokens as bytes, and bytes as tokens."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.vocab_size, self.ends = vocab_size, list(eos_ids)
        self._tokenizer = tokenizer
        self._texts = [tokenizer.decode_bytes([token]) for token in range(vocab_size)]
        # All tokens by their first bytes, short ones first; and for each where its first byte begins.
        texts = self._texts
        order = sorted(
            range(vocab_size), key=lambda token: (texts[token][:1], len(texts[token]), texts[token])
        )
        begins = [i == 0 or texts[order[i - 1]][:1] != texts[order[i]][:1] for i in range(vocab_size)]
        self._shortest = np.array(order, np.int64)
        self._first = np.maximum.accumulate(np.where(begins, np.arange(vocab_size), 0))
        self._ways: OrderedDict[tuple[bytes, bytes], Ways] = OrderedDict()
        self._written: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def write(self, data: bytes) -> list[int]:
        with self._lock:
            if data in self._written:
                self._written.move_to_end(data)
                return list(self._written[data])
        tokens = list(self._tokenizer.tokenize_bytes(data))
        if len(data) <= MOST_KEPT:
            with self._lock:
                self._written[data] = tuple(tokens)
                while len(self._written) > REMEMBERED:
                    self._written.popitem(last=False)
        return tokens

    def beginnings(self, data: bytes) -> list[int]:
        """The tokens that `data` may begin with, the longest first."""
        fits = [token for token, text in enumerate(self._texts) if text and data.startswith(text)]
        return sorted(fits, key=lambda token: -len(self._texts[token]))

    def ways(self, data: bytes, behind: np.ndarray) -> Ways:
        """How `data` is written before tokens of the mask `behind`: a few of each first byte are tried."""
        key = (data, np.packbits(behind).tobytes())
        with self._lock:
            if key in self._ways:
                self._ways.move_to_end(key)
                return self._ways[key]
        fits = behind[self._shortest]
        before = np.cumsum(fits) - fits  # such tokens so far
        few = self._shortest[fits & (before - before[self._first] < PER_BYTE)]
        found = Ways.of([self.write(data + self._texts[token]) for token in few.tolist()])
        with self._lock:
            self._ways[key] = found
            while len(self._ways) > REMEMBERED:
                self._ways.popitem(last=False)
        return found


@dataclass(frozen=True, slots=True)
class Ways:
    """Some writings of a text: the tokens that all begin with, and the first tokens, the commonest first."""

    common: tuple[int, ...]
    first: tuple[int, ...]
    share: float
    """Of the commonest."""

    @classmethod
    def of(cls, variants: Sequence[Sequence[int]]) -> Ways:
        counts = Counter(variant[0] for variant in variants)
        first = sorted(counts, key=lambda token: (-counts[token], token))
        common = next(iter(variants), ())
        for variant in variants:
            common = common[: _num_alike(common, variant)]
        return cls(tuple(common), tuple(first), counts[first[0]] / len(variants) if first else 0.0)


class LlgMatcher:
    """One answer's state in a compiled grammar (runtime/structured/guide.py says what a matcher is)."""

    __slots__ = ("_alphabet", "_forced", "_mask", "_matcher")

    def __init__(self, matcher: Any, alphabet: Alphabet) -> None:
        self._matcher, self._alphabet = matcher, alphabet
        self._mask: np.ndarray | None = None
        self._forced: list[int] | None = None

    def forced(self) -> list[int]:
        """The tokens that must follow; none where there is a choice, or nothing but the end."""
        if self._forced is None:
            forced: list[int] = self._matcher.compute_ff_tokens()
            self._check()
            self._forced = self._settled(forced) if forced else []
        return self._forced

    def mask(self) -> np.ndarray:
        """Bool [vocab]: the tokens that may follow, without those that end."""
        if self._mask is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            self._check()
            mask = np.unpackbits(bits, bitorder="little")[: self._alphabet.vocab_size].view(bool)
            mask[self._alphabet.ends] = False
            if not mask.any() and not self.may_end:
                raise SessionError(
                    f"nothing that is allowed so far can be continued under the grammar; {SIMPLER}"
                )
            self._mask = mask
        return self._mask

    def allows(self, token: int) -> bool:
        """Whether a token may follow; asked of the matcher alone unless the mask is known."""
        if not 0 <= token < self._alphabet.vocab_size or token in self._alphabet.ends:
            return False
        if self._mask is not None:
            return bool(self._mask[token])
        is_allowed: bool = self._matcher.validate_tokens([token]) == 1
        self._check()
        return is_allowed

    def likely(self) -> tuple[int, float] | None:
        """Of the ways to write a text that is forced: the commonest first token, and its share."""
        data = bytes(self._matcher.compute_ff_bytes())
        self._check()
        if not data or len(data) > 16 * MOST_SETTLED:
            return None
        after = LlgMatcher(self._matcher.deep_copy(), self._alphabet)  # its mask is another
        if not all(after._matcher.consume_token(token) for token in self._alphabet.write(data)):
            return None
        if after.is_over:
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
        other._mask, other._forced = self._mask, self._forced  # of the same state; nobody changes them
        return other

    @property
    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def is_over(self) -> bool:
        return self.may_end and not self.mask().any()

    def _settled(self, forced: list[int]) -> list[int]:
        """The forced tokens that stay as they are whatever follows; the mask knows the others.

        The library leaves out a last token that another could extend. With byte pairs what follows may move
        the ends of tokens before: `"}}` is written as `"` and `}}`, but before a comma as `"}` and `},`.
        """
        if len(forced) > MOST_SETTLED:
            return forced[:MOST_SETTLED]
        data = bytes(self._matcher.compute_ff_bytes())
        if (num := self._matcher.validate_tokens(forced)) < len(forced):
            # The name of a special token, such as <|mask|>, is text here: spelled by the longest tokens.
            return forced[:num] or self._longest(data)
        if len(data) > 16 * MOST_SETTLED:
            return forced
        after = LlgMatcher(self._matcher.deep_copy(), self._alphabet)  # its mask is another
        if not all(after._matcher.consume_token(token) for token in self._alphabet.write(data)):
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

    def _longest(self, data: bytes) -> list[int]:
        fits = self._alphabet.beginnings(data)
        return next(([token] for token in fits if self._matcher.validate_tokens([token]) == 1), [])

    def _check(self) -> None:
        if self._matcher.is_error():
            raise SessionError(f"the grammar went wrong ({_words(self._matcher.get_error())}); {SIMPLER}")


def leaves_a_choice(matcher: LlgMatcher) -> bool:
    """Whether anything but one text satisfies the grammar."""
    matcher, left = matcher.copy(), MOST_CERTAIN
    while (forced := matcher.forced()) and left > 0:
        left -= len(forced)
        for token in forced:
            matcher.consume(token)
    return left <= 0 or not matcher.is_over


def _num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/")


def _words(message: str) -> str:
    """The part of a message that is about the grammar, in a length that can be read."""
    words = " ".join(message.replace("<non-verbose/>", "").split())[:300]
    return "nothing satisfies it" if words == "NoExtensionBias" else words


@contextmanager
def _no_panic(what: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit, SessionError):
        raise
    except BaseException as error:  # a panic of the Rust library is no Exception
        raise SessionError(f"{what} ({_words(str(error) or type(error).__name__)}); {remedy}") from error


def _import() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise SessionError(f"schema, regex, choice and tools need llguidance; {INSTALL}") from error
    return llguidance
