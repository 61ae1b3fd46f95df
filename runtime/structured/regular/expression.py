"""Regular expressions as trees, read from patterns with Python's parser. Features that dialects do not share
are refused by name.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ...errors import SessionError

CharRange = tuple[int, int]
"""Two code points or two bytes, the last one included."""

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
LENGTHS = ((0x0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, LAST))  # characters of 1, 2, 3, 4 bytes


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly these bytes."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of these ranges of code points, in UTF-8."""

    ranges: tuple[CharRange, ...]


@dataclass(frozen=True, slots=True)
class Concatenation:
    """All parts, in order."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Alternatives:
    """One of the options."""

    options: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`part`, `minimum` to `maximum` times; None for no upper bound."""

    part: Expression
    minimum: int
    maximum: int | None


Expression = Literal | Characters | Concatenation | Alternatives | Repeat

EMPTY = Literal(b"")


def text(value: str) -> Literal:
    return Literal(value.encode("utf-8"))


def sequence(*parts: Expression) -> Expression:
    return parts[0] if len(parts) == 1 else Concatenation(parts)


def choice(options: Iterable[Expression]) -> Expression:
    # Only literals are compared: a nested expression may be shared many times, so comparing it is slow.
    distinct = {option.data if isinstance(option, Literal) else id(option): option for option in options}
    unique = tuple(distinct.values())
    return unique[0] if len(unique) == 1 else Alternatives(unique)


def optional(part: Expression) -> Expression:
    return Repeat(part, 0, 1)


def characters(ranges: Iterable[CharRange]) -> Characters:
    """One of these characters; ranges may overlap and be in any order. Surrogates are left out."""
    joined: list[CharRange] = []
    for low, high in sorted(_without(ranges, *SURROGATES)):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return Characters(tuple(joined))


def other_characters(ranges: Sequence[CharRange]) -> Characters:
    """All characters but these."""
    start, gaps = 0, []
    for low, high in characters(ranges).ranges:
        if low > start:
            gaps.append((start, low - 1))
        start = high + 1
    return characters([*gaps, (start, LAST)] if start <= LAST else gaps)


def utf8(ranges: Iterable[CharRange]) -> Iterator[tuple[CharRange, ...]]:
    """The UTF-8 encodings of these characters, as sequences of byte ranges."""
    for low, high in ranges:
        for first, last in LENGTHS:
            if low <= last and high >= first:
                yield from _bytes(chr(max(low, first)).encode(), chr(min(high, last)).encode())


def _bytes(low: bytes, high: bytes) -> Iterator[tuple[CharRange, ...]]:
    """Sequences of one length, from `low` to `high`."""
    if len(low) == 1:
        yield ((low[0], high[0]),)
        return
    rest = len(low) - 1
    lowest, highest = b"\x80" * rest, b"\xbf" * rest
    if low[0] == high[0]:
        for tail in _bytes(low[1:], high[1:]):
            yield ((low[0], low[0]), *tail)
        return
    first, last = low[0], high[0]
    if low[1:] != lowest:
        for tail in _bytes(low[1:], highest):
            yield ((first, first), *tail)
        first += 1
    tails = [] if high[1:] == highest else [((last, last), *tail) for tail in _bytes(lowest, high[1:])]
    if tails:
        last -= 1
    if first <= last:
        yield ((first, last), *[(0x80, 0xBF)] * rest)
    yield from tails


def _without(ranges: Iterable[CharRange], first: int, last: int) -> Iterator[CharRange]:
    for low, high in ranges:
        if low < first:
            yield (low, min(high, first - 1))
        if high > last:
            yield (max(low, last + 1), high)


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
        minimum, maximum, part = value
        return Repeat(_all(part), minimum, None if maximum == PARSER.MAXREPEAT else maximum)
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
