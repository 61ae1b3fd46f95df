"""Schemas as generators write them: what allows everything is left out, what constrains stays."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.missing import need

from mars_export.runtime.structured.grammar import FORMATS, simplified

STRING = {"type": "string"}
SAME: list[Any] = [
    {"type": "string", "format": "date-time"},
    {"propertyNames": {"pattern": "^a"}},
    {"type": "integer", "minimum": 2**64},  # the other direction: nothing else would satisfy it
    {"maximum": -(2**70)},
    {"minimum": 5, "maxLength": 7, "exclusiveMinimum": True, "uniqueItems": True},
    {"const": {"format": "binary"}, "enum": [{"format": "x"}], "default": {"uniqueItems": False}},
    {"properties": {"format": STRING, "maximum": STRING}, "required": ["format"]},
]


@pytest.mark.parametrize("schema", SAME, ids=json.dumps)
def test_what_constrains_stays(schema: Any) -> None:
    assert simplified(schema) == schema


@pytest.mark.parametrize(
    "part",
    [
        *({"format": name} for name in ("binary", "password", "ipv4network", "base64", "int32", "")),
        {"propertyNames": {**STRING, "title": "Key", "format": "path"}},
        {"propertyNames": True},
        {"uniqueItems": False},
        {"minimum": -(2**63), "maximum": 2**63 - 1},
        {"exclusiveMinimum": -1e300, "exclusiveMaximum": 1.7976931348623157e308},
        {"maxLength": 2**40, "maxItems": 2.0**63},
    ],
    ids=json.dumps,
)
def test_what_allows_everything_goes_wherever_it_is(part: dict[str, Any]) -> None:
    parent = {"type": "object", "$defs": {"a": {"anyOf": [{**STRING, **part}]}}, "items": [part, True]}
    assert simplified(parent) == {"type": "object", "$defs": {"a": {"anyOf": [STRING]}}, "items": [{}, True]}


def test_the_formats_are_those_of_llguidance() -> None:
    need("llguidance", "grammar")
    from llguidance import LLMatcher as matcher

    more = ("regex", "iri", "idn-email", "uri-reference", "uri-template", "json-pointer", "byte", "binary")
    for name in {*FORMATS, *more}:
        fault = matcher.validate_grammar(matcher.grammar_from_json_schema({**STRING, "format": name}))
        assert ("Unknown format" in fault) == (name not in FORMATS), name
