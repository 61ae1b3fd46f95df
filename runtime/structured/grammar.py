"""Grammars of answers, compiled by llguidance from schemas in the form that it takes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from ..bundle.turns import ThinkingMarks
from ..decode.config import GenerationConfig
from ..errors import SessionError, no_panic
from ..text.dialects import Dialect, call_forms
from .matcher import SIMPLER, TokenMatcher
from .vocabulary import Vocabulary, words_of

# The formats of strings that llguidance knows. By the standard, any other is an annotation.
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
NOTES = {"$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default"} | {
    "examples", "deprecated", "readOnly", "writeOnly",
}  # fmt: skip
NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # schemas by a name
NOT_SCHEMAS = {"const", "enum", "default", "examples"}
LOWER, UPPER = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
LARGEST = 2**63 - 512  # as a float, 2**63
MAX_COUNT = 2**31


def simplified(schema: Any) -> Any:
    """A copy of a schema without what allows everything: unknown formats, `propertyNames` that only says "a
    string", `uniqueItems` false, and bounds beyond int64.
    """
    if isinstance(schema, list):
        return [simplified(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, Mapping):
            value = {name: simplified(part) for name, part in value.items()}
        elif key in COUNTS and isinstance(value, float) and value.is_integer():
            value = int(value)
        elif key not in NOT_SCHEMAS:
            value = simplified(value)
        if not _allows_all(key, value, schema):
            made[key] = value
    return made


def _allows_all(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if key == "format":
        kinds = schema.get("type", "string")
        is_text = "string" in kinds if isinstance(kinds, list | str) else True
        return isinstance(value, str) and (value not in FORMATS or not is_text)
    if key == "propertyNames":
        names = {k: v for k, v in value.items() if k not in NOTES} if isinstance(value, Mapping) else value
        return names in (True, {}, {"type": "string"}, {"type": ["string"]})
    if key == "uniqueItems":
        return value is False
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    if key in COUNTS:
        return key.startswith("max") and value >= MAX_COUNT
    return (key in LOWER and value <= -LARGEST) or (key in UPPER and value >= LARGEST)


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
    """The form that a config asks of an answer; one of the first four is set, or schema and tools.

    thinking: whether calls may come after thinking (False), or must because the prompt has begun it (True)
    """

    schema: str | None
    regex: str | None
    choice: tuple[str, ...] | None
    tools: str | None
    separators: tuple[str, str]
    thinking: bool | None


class Grammars:
    """Grammars over a vocabulary, each compiled once and cached. Thread-safe.

    `dialect` says how the model writes calls, and `marks` what is around its thinking.
    """

    def __init__(self, vocabulary: Vocabulary, dialect: Dialect, marks: ThinkingMarks | None = None) -> None:
        self._vocabulary, self._library = vocabulary, vocabulary.library
        self._dialect, self._marks = dialect, marks
        self._limits = self._library.LLParserLimits(**LIMITS)
        self._compiled = lru_cache(CACHED_GRAMMARS)(self._compile)

    def matcher(self, config: GenerationConfig, thinking: bool | None = None) -> TokenMatcher:
        """A matcher at the beginning of an answer. Calls may come after `thinking`; True: the prompt has
        begun it. Raises SessionError if no answer satisfies the grammar.
        """
        schema, tools = (None if value is None else str(value) for value in (config.schema, config.tools))
        choice = None if config.choice is None else tuple(config.choice)
        separators = config.separators or SEPARATORS
        thinking = None if self._marks is None or tools is None else thinking
        compiled = self._compiled(AnswerForm(schema, config.regex, choice, tools, separators, thinking))
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
            if form.tools is None:
                return str(library.grammar_from_json_schema(schema, overrides=options))
            answer = json.dumps(json.loads(schema) | {"x-guidance": options})
        assert form.tools is not None, "a structured config has one of them"
        forms = [
            " ".join(
                [
                    *_quoted(begin),
                    f"%json {json.dumps(simplified(schema) | {'x-guidance': options})}",
                    *_quoted(end),
                ]
            )
            for begin, schema, end in call_forms(json.loads(form.tools), self._dialect)
        ]
        lines = ["call: " + " | ".join(forms)]
        calls = r'call ("\n"? call)* "\n"?' if self._dialect.repeats else "call"
        if form.schema is not None:
            calls = f"({calls} | answer)"
            lines.append(f"answer: %json {answer}")
        if form.thinking is not None:
            assert self._marks is not None
            start = "thought" if form.thinking else f"({json.dumps(self._marks.open)} thought)?"
            calls = f"{start} {calls}"
            lines += [
                r"thought: thinking /[ \t\r\n]{0,8}/",
                rf"thinking[lazy]: /(.|\n)*/ {json.dumps(self._marks.close)}",
            ]
        return "\n".join([f"start: {calls}", *lines])


def _quoted(text: str) -> list[str]:
    return [json.dumps(text)] if text else []


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/")
