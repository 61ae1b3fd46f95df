"""What a regular language is built from: texts, characters, sequences, choices, repetitions. Knows no schema
and no automaton.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Range = tuple[int, int]
"""Two code points or two bytes, the last one included."""

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
LENGTHS = ((0x0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, LAST))  # characters of 1, 2, 3, 4 bytes


@dataclass(frozen=True, slots=True)
class Text:
    """These very bytes."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of these ranges of code points, in UTF-8."""

    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Sequence_:
    """One part after the other."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of these."""

    options: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`part` at least `least` times, at most `most` times; None for as often as one likes."""

    part: Expression
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Any text, in which `mark` (ASCII) stands only where `inner` follows, after which the text goes on."""

    mark: bytes
    inner: Expression


Expression = Text | Characters | Sequence_ | Choice | Repeat | Interrupted

EMPTY = Text(b"")


def text(value: str) -> Text:
    return Text(value.encode("utf-8"))


def sequence(*parts: Expression) -> Expression:
    return parts[0] if len(parts) == 1 else Sequence_(parts)


def choice(options: Iterable[Expression]) -> Expression:
    # Texts that are the same become one; what is nested is not looked into, for it may be shared many times.
    kept = {option.data if isinstance(option, Text) else id(option): option for option in options}
    each = tuple(kept.values())
    return each[0] if len(each) == 1 else Choice(each)


def optional(part: Expression) -> Expression:
    return Repeat(part, 0, 1)


def characters(ranges: Iterable[Range]) -> Characters:
    """Of ranges in any order, overlapping ones joined; surrogates are no characters."""
    joined: list[Range] = []
    for low, high in sorted(_without(ranges, *SURROGATES)):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return Characters(tuple(joined))


def other_characters(ranges: Sequence[Range]) -> Characters:
    """All characters but these."""
    left, found = 0, []
    for low, high in characters(ranges).ranges:
        if low > left:
            found.append((left, low - 1))
        left = high + 1
    return characters([*found, (left, LAST)] if left <= LAST else found)


def utf8(ranges: Iterable[Range]) -> Iterator[tuple[Range, ...]]:
    """The byte ranges, one after the other, that write characters of these ranges."""
    for low, high in ranges:
        for first, last in LENGTHS:
            if low <= last and high >= first:
                yield from _bytes(chr(max(low, first)).encode(), chr(min(high, last)).encode())


def _bytes(low: bytes, high: bytes) -> Iterator[tuple[Range, ...]]:
    """Sequences of one length, from `low` to `high`."""
    if len(low) == 1:
        yield ((low[0], high[0]),)
        return
    rest = len(low) - 1
    least, most = b"\x80" * rest, b"\xbf" * rest
    if low[0] == high[0]:
        for tail in _bytes(low[1:], high[1:]):
            yield ((low[0], low[0]), *tail)
        return
    first, last = low[0], high[0]
    if low[1:] != least:
        for tail in _bytes(low[1:], most):
            yield ((first, first), *tail)
        first += 1
    tails = [] if high[1:] == most else [((last, last), *tail) for tail in _bytes(least, high[1:])]
    if tails:
        last -= 1
    if first <= last:
        yield ((first, last), *[(0x80, 0xBF)] * rest)
    yield from tails


def _without(ranges: Iterable[Range], first: int, last: int) -> Iterator[Range]:
    for low, high in ranges:
        if low < first:
            yield (low, min(high, first - 1))
        if high > last:
            yield (max(low, last + 1), high)
