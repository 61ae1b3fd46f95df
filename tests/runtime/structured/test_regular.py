"""Regular languages of answers: the very language that llguidance follows for the same request, asked byte by
byte; what is beyond is refused by its name, and what is too large in bounded time.
"""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.automata import walk
from support.missing import need
from support.questions import STOP, WEATHER
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mars_export import GenerationConfig, SessionError
from mars_export.runtime.structured.grammar import Grammars
from mars_export.runtime.structured.regular.automaton import build
from mars_export.runtime.structured.regular.expression import (
    LAST,
    characters,
    other_characters,
    pattern_expression,
    sequence,
    text,
    utf8,
)
from mars_export.runtime.structured.regular.schema import schema_expression
from mars_export.runtime.structured.stored_grammars import compile_grammar
from mars_export.runtime.structured.vocabulary import Vocabulary
from mars_export.runtime.text.dialects import LIST, MARKED, OBJECT, TAGS, Dialect

SEPARATORS = (", ", ": ")
END = 256
STRING = {"type": "string"}
SCHEMAS: list[Any] = [
    STRING,
    {"type": "string", "maxLength": 3},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "integer"},
    {"type": "number"},
    {"type": ["integer", "null", "string"]},
    {"type": "boolean"},
    {"const": 'a\n\x7f"\\/\u00e9\u0001'},
    {"const": 1e20},
    {"const": 0.00001},
    {"enum": ["a", "ab", 1, None, 1.5, 2.0, -3, True, [1, {"x": "y", "\u00e9\n": []}], {}]},
    {"type": "string", "enum": ["a", 1]},
    {
        "type": "object",
        "properties": {
            "a": {"type": "integer"}, "b\n": STRING, "c": {"enum": ["x", "y"]}, "d": {"type": "null"},
        },
        "required": ["c"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "null"}},
        "additionalProperties": False,
    },
    {"type": "object", "additionalProperties": False},
    {"type": "array", "items": {"type": "integer"}},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2},
    {"type": "array", "items": STRING, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": STRING, "maxItems": 0},
    {
        "anyOf": [
            {"type": "string", "maxLength": 2},
            {"type": "array", "items": {"anyOf": [{"type": "null"}, {"const": "null"}]}},
            {
                "type": "object",
                "properties": {"k": {"const": 1}},
                "required": ["k"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {"k": {"const": 2}, "l": {"type": "boolean"}},
                "additionalProperties": False,
            },
        ]
    },
    {
        "$defs": {"c": {"type": "string", "maxLength": 2}},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/c"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "integer"}, {"type": "number"}]},
]  # fmt: skip
TOOLS = [WEATHER, STOP]


@cache
def single_bytes() -> Tokenizer:
    """A tokenizer whose tokens are the 256 bytes, and an end."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.add_special_tokens(["<end>"])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def differences(config: GenerationConfig, dialect: Dialect = LIST, walks: int = 20) -> list[Any]:
    """Beginnings of answers behind which the automaton and llguidance allow other bytes."""
    need("llguidance", "grammar")
    automaton = compile_grammar(config, dialect, SEPARATORS)
    grammars = Grammars(Vocabulary(single_bytes(), 257, [END]), dialect)
    draw = random.Random(1)
    for _ in range(walks):
        matcher, state, said = grammars.matcher(config), 0, b""
        for _ in range(80):
            forced = matcher.forced()
            theirs = set(forced[:1]) if forced else set(np.flatnonzero(matcher.mask()).tolist())
            theirs |= {END} if matcher.may_end else set()
            own = {byte for low, high, _ in automaton.edges[state] for byte in range(low, high + 1)}
            own |= {END} if state in automaton.ends else set()
            if said[-1:] == b"\xed":  # llguidance allows halves of characters, which are no UTF-8
                theirs -= set(range(0xA0, 0xC0))
            if theirs != own:
                return [said, sorted(theirs - own), sorted(own - theirs)]
            going = sorted(own - {END})
            if not going:
                break
            near = [byte for byte in going if byte in b'"\\}],<']
            byte = draw.choice(near if near and draw.random() < 0.4 else going)
            matcher.consume(byte)
            behind = walk(automaton, bytes([byte]), state)
            assert behind is not None
            state, said = behind, said + bytes([byte])
    return []


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:50])
def test_a_schema_has_the_language_of_the_library(schema: Any) -> None:
    assert differences(GenerationConfig(schema=schema, separators=SEPARATORS)) == []


@settings(max_examples=60)
@given(st.none() | st.integers(-1500, 1500), st.none() | st.integers(0, 3000))
def test_integers_between_bounds(low: int | None, width: int | None) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    if low is not None:
        schema["minimum"] = low
    if width is not None:
        schema["maximum"] = (low or 0) + width
    assert differences(GenerationConfig(schema=schema, separators=SEPARATORS), walks=6) == []
    automaton = build(schema_expression(schema, SEPARATORS))
    for number in {*range(-30, 31), low or 0, (low or 0) - 1, (low or 0) + (width or 0), 123456}:
        found = walk(automaton, str(number).encode())
        assert (found in automaton.ends) == jsonschema.Draft202012Validator(schema).is_valid(number)


@pytest.mark.parametrize("dialect", [LIST, replace(OBJECT, key="parameters"), *MARKED], ids=str)
def test_calls_have_the_language_of_the_library(dialect: Dialect) -> None:
    config = GenerationConfig(tools=TOOLS, separators=SEPARATORS)
    assert differences(config, dialect, walks=60) == []
    automaton = compile_grammar(config, dialect, SEPARATORS)
    if dialect == TAGS:
        call = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
        for said in (call, f"{call}\n", f"{call}{call}", f"{call}\n{call}"):
            assert walk(automaton, said.encode()) in automaton.ends
        for said in ("", "hi", "<tool_call>", '<tool_call>\n{"name": "halt"', f"{call} ", f"{call}\n<"):
            assert walk(automaton, said.encode()) not in automaton.ends


REGEXES = [
    r"[A-Z]{2}[0-9]{4}", r"(a|bc)*d?", r"[^\n]{2,3}x", r".+\.txt", "(foo|bar){2}|\u00e9+", "[^\u00e9]a",
    "[\u00e0-\u00fc]{1,2}",
    r"[\u4e00-\u9fff]", r"a{3,}b*", r"\x41\+\.\-", r"[\]\-a]", r"[]a]", r"a||b", r"(?:ab)+",
]  # fmt: skip


@pytest.mark.parametrize("regex", REGEXES)
def test_a_regex_has_the_language_of_the_library(regex: str) -> None:
    assert differences(GenerationConfig(regex=regex.replace("(?:", "("))) == []
    automaton = build(pattern_expression(regex))
    draw = random.Random(7)
    for _ in range(100):
        said = "".join(draw.choice('abcdfoX01\u00e9\u00e8.tx"-]+A') for _ in range(draw.randrange(6)))
        assert (walk(automaton, said.encode()) in automaton.ends) == bool(re.fullmatch(regex, said)), said


def test_classes_are_those_of_ascii() -> None:
    """llguidance's are Unicode's, of the version it was built with."""
    for letter in "dws":
        automaton = build(pattern_expression(f"\\{letter}|\u00e9"))
        for code in range(256):
            said, ours = chr(code), re.fullmatch(f"\\{letter}", chr(code), re.ASCII) is not None
            assert (walk(automaton, said.encode()) in automaton.ends) == (ours or code == 0xE9)


@given(st.lists(st.tuples(st.integers(0, LAST), st.integers(0, LAST)), max_size=4))
def test_characters_are_written_in_utf8(pairs: list[tuple[int, int]]) -> None:
    ranges = characters([(min(pair), max(pair)) for pair in pairs]).ranges
    inside = {
        code for low, high in ranges for code in (low, high, (low + high) // 2) if not 0xD800 <= code < 0xE000
    }
    outside = {code for low, high in other_characters(ranges).ranges for code in (low, high)}
    sequences = list(utf8(ranges))

    def fits(data: bytes) -> bool:
        return any(
            len(each) == len(data) and all(a <= byte <= b for byte, (a, b) in zip(data, each, strict=True))
            for each in sequences
        )

    assert all(fits(chr(code).encode()) for code in inside)
    assert not any(fits(chr(code).encode()) for code in outside)


def test_the_automaton_is_the_smallest() -> None:
    assert len(build(pattern_expression("(abc|dbc|ebc)x*")).edges) == 4
    assert len(build(pattern_expression("(a|aa)*")).edges) == 1
    assert len(build(sequence(text("abc"))).edges) == 4


BEYOND: list[tuple[Any, str]] = [
    ({"type": "string", "pattern": "a"}, "`pattern`"),
    ({"type": "string", "format": "date"}, "`format`"),
    ({"oneOf": [STRING]}, "`oneOf`"),
    ({"not": STRING}, "`not`"),
    ({"allOf": [STRING]}, "`allOf`"),
    ({"type": "integer", "multipleOf": 3}, "`multipleOf`"),
    ({"type": "number", "minimum": 0}, "`minimum`"),
    ({"type": "integer", "exclusiveMinimum": 3}, "`exclusiveMinimum`"),
    ({"type": "integer", "minimum": 0.5}, "`minimum` 0.5"),
    ({}, "allows anything"),
    (True, "allows anything"),
    ({"type": "object"}, "`additionalProperties`"),
    ({"type": "object", "additionalProperties": STRING}, "`additionalProperties`"),
    ({"type": "object", "additionalProperties": False, "minProperties": 1}, "`minProperties`"),
    ({"type": "object", "additionalProperties": False, "required": ["a"]}, "`properties` lacks"),
    ({"type": "object", "additionalProperties": False, "patternProperties": {}}, "`patternProperties`"),
    ({"type": "array"}, "`items`"),
    ({"type": "array", "items": STRING, "uniqueItems": True}, "`uniqueItems`"),
    ({"type": "array", "items": STRING, "prefixItems": []}, "`prefixItems`"),
    ({"type": "array", "items": STRING, "minItems": 3, "maxItems": 2}, "nothing satisfies both"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "do not exist"),
    ({"type": "string", "maxLength": 10**9}, "`maxLength` 1000000000"),
    ({"type": "song"}, 'type "song"'),
    ({"type": "string", "enum": [1]}, "nothing satisfies"),
    ({"anyOf": []}, "empty `anyOf`"),
    ({"anyOf": [STRING], "type": "string"}, "`type` beside `anyOf`"),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
        "recursion by `$ref`",
    ),
    ({"$ref": "#"}, "recursion by `$ref`"),
    ({"$ref": "other.json"}, "references stay inside"),
    ({"$ref": "#/$defs/b"}, "leads nowhere"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "word"), BEYOND, ids=[word for _, word in BEYOND])
def test_what_is_beyond_is_refused_by_its_name(schema: Any, word: str) -> None:
    with pytest.raises(SessionError, match=re.escape(word)):
        compile_grammar(GenerationConfig(schema=schema), "list", SEPARATORS)


@pytest.mark.parametrize(
    "regex", ["(?i)a", "^a$", "a*?", "a**", r"\bx", r"\1", r"\p{L}", "(a", "a)", "[a", "[]", "[b-a]",
              "a{2,1}", "a{", "a{x}", "a{,3}", "]", "[[a]]", "[a&&b]", "(?=a)", "a\\", "(?i:a)", r"\ud800"],
)  # fmt: skip
def test_a_regex_of_another_dialect_is_refused(regex: str) -> None:
    with pytest.raises(SessionError, match="regex: .* a stored grammar has"):
        build(pattern_expression(regex))


DOUBLING = {f"a{i}": {"type": "array", "items": {"anyOf": [{"$ref": f"#/$defs/a{i - 1}"}, {
    "type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i - 1}"}}, "additionalProperties": False,
}]}} for i in range(1, 40)}  # fmt: skip
HUGE: list[dict[str, Any]] = [
    {"schema": {"$ref": "#/$defs/a39", "$defs": {"a0": {"type": "integer"}, **DOUBLING}}},
    {"schema": {"type": "string", "maxLength": 100_000}},
    {"schema": {"type": "array", "items": {"type": "string", "maxLength": 300}, "maxItems": 300}},
    {"regex": "(a|b)*a(a|b){20}"},
    {"regex": "(.{0,100}){0,100}"},
    {"regex": "((a{1,30}){1,30}){1,30}"},
    {"schema": {"enum": ["x" * 900 + str(i) for i in range(1000)]}},
]


@pytest.mark.parametrize("request_", HUGE, ids=lambda request: str(request)[:50])
def test_what_is_too_large_is_refused_in_time(request_: dict[str, Any]) -> None:
    begun = time.process_time()
    with pytest.raises(SessionError, match=r"simpler|too large|repetitions written out|fewer or shorter"):
        compile_grammar(GenerationConfig(**request_), "list", SEPARATORS)
    assert time.process_time() - begun < 60
