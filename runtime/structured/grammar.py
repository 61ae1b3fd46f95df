"""Grammars of schemas, regular expressions, choices and tools, compiled by llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ..decode.config import GenerationConfig
from ..errors import SessionError
from ..text import toolcalls
from ..text.tokenizer import no_panic
from .matcher import SIMPLER, TokenMatcher
from .simplify import simplified
from .vocabulary import Vocabulary, words_of

SEPARATORS = (", ", ": ")
CACHED_GRAMMARS = 64  # compiled grammars of a session
# They bound compilation to about a second and 300 MB, and a step to tens of milliseconds.
LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 300_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}


class AnswerForm(NamedTuple):
    """The form that a config asks of an answer; one of the first four is set."""

    schema: str | None
    regex: str | None
    choice: tuple[str, ...] | None
    tools: str | None
    separators: tuple[str, str]


class Grammars:
    """Grammars over a vocabulary, each compiled once and cached. Thread-safe.

    `dialect` says how the model writes calls.
    """

    def __init__(self, vocabulary: Vocabulary, dialect: toolcalls.Dialect) -> None:
        self._vocabulary, self._library, self._dialect = vocabulary, vocabulary.library, dialect
        self._limits = self._library.LLParserLimits(**LIMITS)
        self._compiled = lru_cache(CACHED_GRAMMARS)(self._compile)

    def matcher(self, config: GenerationConfig) -> TokenMatcher:
        """A matcher at the beginning of an answer. Raises SessionError if no answer satisfies the grammar."""
        schema, tools = (None if value is None else str(value) for value in (config.schema, config.tools))
        choice = None if config.choice is None else tuple(config.choice)
        separators = config.separators or SEPARATORS
        compiled = self._compiled(AnswerForm(schema, config.regex, choice, tools, separators))
        return TokenMatcher(compiled.deep_copy(), self._vocabulary)

    def _compile(self, form: AnswerForm) -> Any:
        with no_panic(SessionError, "the grammar cannot be compiled", SIMPLER):
            grammar, tokenizer = self._grammar(form), self._vocabulary.tokenizer
            compiled = self._library.LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits)
        if compiled.is_error():
            raise SessionError(
                f"the grammar cannot be compiled ({words_of(compiled.get_error())}); {SIMPLER}"
            )
        first = TokenMatcher(compiled.deep_copy(), self._vocabulary)
        if not first.forced():
            first.mask()  # raises if nothing satisfies the grammar
        return compiled

    def _grammar(self, form: AnswerForm) -> str:
        library, (item, key) = self._library.LLMatcher, form.separators
        options = {"item_separator": item, "key_separator": key, "whitespace_flexible": False}
        if form.regex is not None:
            return str(library.grammar_from_regex(form.regex))
        if form.choice is not None:
            return str(library.grammar_from_regex("|".join(map(_escaped, dict.fromkeys(form.choice)))))
        if form.schema is not None:
            if form.schema == "false":
                raise SessionError("the schema `false` allows no answer; use another one")
            schema = "{}" if form.schema == "true" else json.dumps(simplified(json.loads(form.schema)))
            return str(library.grammar_from_json_schema(schema, overrides=options))
        assert form.tools is not None, "a structured config has one of them"
        tools = json.loads(form.tools)
        if self._dialect == "list":
            return str(
                library.grammar_from_json_schema(simplified(toolcalls.list_schema(tools)), overrides=options)
            )
        return str(self._library.StructTag.to_grammar([*self._tags(tools, options)], assume_special=False))

    def _tags(self, tools: Sequence[dict[str, Any]], options: dict[str, Any]) -> Iterator[Any]:
        for tool in tools:
            begin, end = toolcalls.tagged(tool, options["item_separator"], options["key_separator"])
            schema = simplified(toolcalls.parameters(tool)) | {"x-guidance": options}
            yield self._library.StructTag(trigger=toolcalls.OPEN, begin=begin, grammar=schema, end=end)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/")
