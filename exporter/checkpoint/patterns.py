"""Values by module name or by a regular expression for one, as PEFT reads them.

Knows which expressions are cheap.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

LONGEST = 200  # characters
MOST_EXPRESSIONS = 16  # besides plain names
# A backtracking matcher tries about name ** repeats places, times the alternatives.
MOST_REPEATS, MOST_WAYS = 2, 16
ATOM = re.compile(
    r"\\[.dwDW_-]|\[[^]\\[]+\]|[\w.^$-]|(?P<open>\()|(?P<close>\))|(?P<bar>\|)|(?P<repeat>[*+?])"
)


@dataclass(frozen=True, slots=True)
class Patterns(Generic[T]):
    """`values` by pattern; the first that matches a module's whole name, or its end behind a dot, counts.

    Raises ValueError for an expression that could take more than a moment to try (a repeated group, many
    repeats).
    """

    values: Mapping[str, T]
    _compiled: Mapping[str, re.Pattern[str]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        expressions = 0
        for pattern in self.values:
            expressions += bool(re.search(r"[^\w.]", pattern))
            if problem := _problem(pattern):
                raise ValueError(f"the pattern {pattern[:80]!r} is not read: {problem}")
        if expressions > MOST_EXPRESSIONS:
            raise ValueError(f"{expressions} regular expressions are more than {MOST_EXPRESSIONS}")
        try:
            compiled = {pattern: re.compile(rf"(.*\.)?({pattern})") for pattern in self.values}
        except re.error as error:
            raise ValueError(f"a pattern is not a regular expression ({error})") from error
        object.__setattr__(self, "_compiled", compiled)

    def find(self, module: str, default: T) -> T:
        for pattern, expression in self._compiled.items():
            if expression.fullmatch(module):
                return self.values[pattern]
        return default


def _problem(pattern: str) -> str | None:
    """Why an expression is not tried; None for names, classes, few alternatives and few repeats."""
    at = repeats = depth = 0
    ways, alternatives = 1, 1  # through all groups, and through the present one
    previous = "open"
    if not pattern or len(pattern) > LONGEST:
        return f"1 to {LONGEST} characters are expected"
    while at < len(pattern):
        atom = ATOM.match(pattern, at)
        if atom is None:
            return f"{pattern[at]!r} is not one of the signs known here"
        kind = atom.lastgroup or "plain"
        depth += (kind == "open") - (kind == "close")
        repeats += kind == "repeat"
        alternatives += kind == "bar"
        if kind in ("open", "close"):
            ways, alternatives = ways * alternatives, 1
        if not 0 <= depth <= 1:
            return "groups in groups, or one without its other end"
        if kind == "repeat" and previous != "plain":
            return "a repeated group"
        previous, at = kind, atom.end()
    if depth:
        return "a group without its end"
    if repeats > MOST_REPEATS or ways * alternatives > MOST_WAYS:
        return f"more than {MOST_REPEATS} repeats, or more than {MOST_WAYS} ways through its alternatives"
    return None
