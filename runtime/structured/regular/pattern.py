"""Reads regular expressions by Python's parser, and refuses by name what dialects do not share."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from ...errors import SessionError
from .expression import EMPTY, CharRange, Expression, Repeat, characters, choice, other_characters, sequence

# Python has no public name for it.
PARSER = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
CLASSES: dict[str, list[CharRange]] = {
    "DIGIT": [(48, 57)],
    "WORD": [(48, 57), (65, 90), (95, 95), (97, 122)],
    "SPACE": [(9, 13), (32, 32)],
}
KNOWN = "characters, classes, groups, |, *, +, ? and {n,m}"
NAMES = {"AT": "an anchor", "MIN_REPEAT": "a lazy repetition", "GROUPREF": "a back-reference"}
NAMES |= {"ASSERT": "look-around", "ASSERT_NOT": "look-around", "SUBPATTERN": "flags"}
# Braces and brackets that Python takes as characters, and other dialects do not.
BRACES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{[0-9]+(?:,[0-9]*)?\}|(?P<wrong>[{}\]])", re.DOTALL)


def pattern_expression(source: str) -> Expression:
    """The language of a regular expression that must match the whole text. Raises SessionError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of set operations in classes
            parsed = PARSER.parse(source)
    except (re.error, RecursionError, OverflowError, Warning) as error:
        raise _refused(str(error) or "nested too deeply") from error
    if parsed.state.flags & ~int(re.UNICODE):
        raise _refused("flags")
    if wrong := next((match["wrong"] for match in BRACES.finditer(source) if match["wrong"]), None):
        raise _refused(f"`{wrong}` without a count or a class, write `\\{wrong}`")
    return _all(parsed)


def _all(parsed: Iterable[tuple[Any, Any]]) -> Expression:
    parts = [_one(str(kind), value) for kind, value in parsed]
    return sequence(*parts) if parts else EMPTY


def _one(kind: str, value: Any) -> Expression:
    if kind == "LITERAL":
        return characters([_code(value)])
    if kind == "NOT_LITERAL":
        return other_characters([_code(value)])
    if kind == "ANY":
        return other_characters([(10, 10)])
    if kind == "IN":
        is_other = str(value[0][0]) == "NEGATE"
        ranges = [part for inner, content in value[is_other:] for part in _ranges(str(inner), content)]
        members = other_characters(ranges) if is_other else characters(ranges)
        if not members.ranges:
            raise _refused("a class without characters")
        return members
    if kind == "BRANCH":
        return choice([_all(option) for option in value[1]])
    if kind == "MAX_REPEAT":
        least, most, part = value
        return Repeat(_all(part), least, None if most == PARSER.MAXREPEAT else most)
    if kind == "SUBPATTERN" and not value[1] and not value[2]:
        return _all(value[3])
    raise _refused(NAMES.get(kind, kind.lower().replace("_", " ")))


def _ranges(kind: str, value: Any) -> Iterable[CharRange]:
    """The characters of a part of a class."""
    if kind == "LITERAL":
        return [_code(value)]
    if kind == "RANGE":
        return [value]
    name = str(value).removeprefix("CATEGORY_")
    members = CLASSES[name.removeprefix("NOT_")]
    return other_characters(members).ranges if name.startswith("NOT_") else members


def _code(value: int) -> CharRange:
    if 0xD800 <= value <= 0xDFFF:
        raise _refused("a lone surrogate")
    return value, value


def _refused(what: str) -> SessionError:
    return SessionError(f"regex: {what}; a stored grammar has {KNOWN} (docs/structured.md)")
