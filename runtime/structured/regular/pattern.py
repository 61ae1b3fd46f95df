"""Parsing regular expressions: the common part of all dialects. Anything else is refused by name."""

from __future__ import annotations

from ...errors import SessionError
from .expression import (
    EMPTY,
    Expression,
    Range,
    Repeat,
    characters,
    choice,
    other_characters,
    sequence,
)

CLASSES: dict[str, list[Range]] = {
    "d": [(48, 57)],
    "w": [(48, 57), (65, 90), (95, 95), (97, 122)],
    "s": [(9, 13), (32, 32)],
}
LETTERS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
MOST_DEEP, MOST_TIMES = 100, 20_000


class _Reader:
    def __init__(self, source: str) -> None:
        self.source, self.at, self.depth = source, 0, 0

    def next(self) -> str:
        return self.source[self.at : self.at + 1]

    def take(self, what: str) -> bool:
        is_next = self.source.startswith(what, self.at)
        self.at += len(what) if is_next else 0
        return is_next

    def wrong(self, what: str) -> SessionError:
        return SessionError(
            f"regex: {what} at character {self.at + 1}: a stored grammar has characters, classes, groups,"
            " |, *, +, ? and {n,m} (docs/structured.md); write it with these"
        )

    def choice(self) -> Expression:
        options = [self.sequence()]
        while self.take("|"):
            options.append(self.sequence())
        return choice(options)

    def sequence(self) -> Expression:
        parts: list[Expression] = []
        while self.next() not in ("", "|", ")"):
            parts.append(self.repeated(self.part()))
        return sequence(*parts) if parts else EMPTY

    def part(self) -> Expression:
        if self.take("("):
            if self.next() == "?" and not self.take("?:"):
                raise self.wrong("a group that begins with `(?`")
            self.depth += 1
            if self.depth > MOST_DEEP:
                raise self.wrong(f"groups more than {MOST_DEEP} deep")
            inner = self.choice()
            if not self.take(")"):
                raise self.wrong("a group without its end")
            self.depth -= 1
            return inner
        if self.take("["):
            return self.bracket()
        if self.take("."):
            return other_characters([(10, 10)])
        if self.next() in tuple("^$*+?{}]"):
            raise self.wrong(f"`{self.next()}`")
        if self.take("\\"):
            ranges, is_other = self.escaped()
            return other_characters(ranges) if is_other else characters(ranges)
        character = self.next()
        self.at += 1
        return characters([(self.code(character),) * 2])

    def code(self, character: str) -> int:
        if 0xD800 <= ord(character) <= 0xDFFF:
            raise self.wrong("a lone surrogate")
        return ord(character)

    def escaped(self) -> tuple[list[Range], bool]:
        """After a backslash: the characters of the class, and whether it is the complement that counts."""
        character = self.next()
        self.at += 1
        if character.lower() in CLASSES:
            return CLASSES[character.lower()], character.isupper()
        if character in LETTERS:
            return [(LETTERS[character],) * 2], False
        if character in ("x", "u"):
            size = 2 if character == "x" else 4
            digits = self.source[self.at : self.at + size]
            if len(digits) != size or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
                raise self.wrong(f"`\\{character}` without {size} hexadecimal digits")
            self.at += size
            return [(self.code(chr(int(digits, 16))),) * 2], False
        if character and not character.isalnum() and ord(character) < 128:
            return [(ord(character),) * 2], False
        raise self.wrong(f"`\\{character}`")

    def bracket(self) -> Expression:
        is_other, ranges, first = self.take("^"), list[Range](), True
        while first or self.next() != "]":
            first = False
            if self.next() in ("", "["):
                raise self.wrong("a class without its end" if not self.next() else "`[` in a class")
            if self.source[self.at : self.at + 2] in ("&&", "--", "~~"):
                raise self.wrong(f"`{self.source[self.at : self.at + 2]}` in a class")
            low = self.member(ranges)
            if self.next() == "-" and self.source[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self.member(ranges)
                if low is None or high is None or low > high:
                    raise self.wrong("a range without two ends in order")
                ranges.append((low, high))
            elif low is not None:
                ranges.append((low, low))
        self.at += 1
        members = other_characters(ranges) if is_other else characters(ranges)
        if not members.ranges:
            raise self.wrong("a class without characters")
        return members

    def member(self, ranges: list[Range]) -> int | None:
        """The next character of a class; None after adding a nested class, such as \\d, to `ranges`."""
        if not self.take("\\"):
            character = self.next()
            if not character:
                raise self.wrong("a class without its end")
            self.at += 1
            return self.code(character)
        escaped, is_other = self.escaped()
        if not is_other and len(escaped) == 1 and escaped[0][0] == escaped[0][1]:
            return escaped[0][0]
        ranges += other_characters(escaped).ranges if is_other else escaped
        return None

    def repeated(self, part: Expression) -> Expression:
        is_repeated = False
        while True:
            if self.take("*"):
                least, most = 0, None
            elif self.take("+"):
                least, most = 1, None
            elif self.take("?"):
                least, most = 0, 1
            elif self.next() == "{":
                least, most = self.counts()
            else:
                return part
            if is_repeated:
                raise self.wrong("a repetition of a repetition, or a lazy one")
            part, is_repeated = Repeat(part, least, most), True

    def counts(self) -> tuple[int, int | None]:
        end = self.source.find("}", self.at)
        inner = self.source[self.at + 1 : end] if end >= 0 else ""
        low, comma, high = inner.partition(",")
        if not (low.isdecimal() and low.isascii() and (high == "" or (high.isdecimal() and high.isascii()))):
            raise self.wrong("`{` without a count")
        if max(len(low), len(high)) > 6 or max(int(low), int(high or 0)) > MOST_TIMES:
            raise self.wrong(f"a count above {MOST_TIMES}")
        self.at = end + 1
        least, most = int(low), (int(low) if not comma else int(high) if high else None)
        if most is not None and least > most:
            raise self.wrong("a count that is less than the one before it")
        return least, most


def pattern_expression(source: str) -> Expression:
    """The language of a regular expression that must match the whole text. Raises SessionError."""
    reader = _Reader(source)
    expression = reader.choice()
    if reader.next():
        raise reader.wrong(f"`{reader.next()}`")
    return expression
