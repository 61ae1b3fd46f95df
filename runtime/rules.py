"""Rules for the fields of a dataclass, written in their annotations: `Annotated[int, integer(1)]`."""

from __future__ import annotations

import re
import reprlib
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from math import inf
from types import NoneType
from typing import Annotated, Any, TypeGuard, get_args, get_origin, get_type_hints

LARGEST = sys.float_info.max


@dataclass(frozen=True, slots=True)
class Rule:
    """A test of a value, and a description of the values that pass it. `metavar` is that of its option on the
    command line, which also says how the option's text is read (terminal/options.py).
    """

    words: str
    holds: Callable[[Any], bool]
    metavar: str | None = None


def broken(value: Any) -> dict[str, str]:
    """The fields of a dataclass that break the rule of their annotation: name -> what is wrong.

    None passes if the annotation allows it.
    """
    problems = {}
    kind: Any = type(value)
    for name, (rule, may_be_none) in _rules(kind).items():
        content = getattr(value, name)
        if not (content is None and may_be_none) and not rule.holds(content):
            problems[name] = f"{name} must be {rule.words}, not {reprlib.repr(content)}"
    return problems


@cache
def _rules(kind: Any) -> dict[str, tuple[Rule, bool]]:
    hints = get_type_hints(kind, include_extras=True).items()
    annotated = {name: get_args(hint) for name, hint in hints if get_origin(hint) is Annotated}
    return {
        name: (rule, NoneType in get_args(inner))
        for name, (inner, rule) in annotated.items()
        if isinstance(rule, Rule)
    }


def is_integer(value: object, low: float = -inf) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a finite number that fits in a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def integer(low: int, words: str = "", *, high: float = inf, metavar: str = "N") -> Rule:
    words = words or f"an integer of {low} " + ("or more" if high == inf else f"to {high}")
    return Rule(words, lambda value: is_integer(value, low) and value <= high, metavar)


def number(words: str, low: float = 0, high: float = inf, *, above: bool = False, metavar: str = "X") -> Rule:
    """From `low` to `high`; `above` excludes `low` itself."""
    return Rule(words, lambda v: is_number(v) and low <= v <= high and not (above and v == low), metavar)


def num_bytes() -> Rule:
    return integer(1, "a number of bytes above 0", metavar="SIZE")


def seconds(*, above: bool = True) -> Rule:
    words = "a number of seconds above 0" if above else "a number of seconds, 0 or more"
    return number(words, above=above, metavar="SECONDS")


def entries(most: int) -> Rule:
    return Rule(f"a list of at most {most} entries", lambda value: len(value) <= most)


def matching(pattern: re.Pattern[str], words: str) -> Rule:
    return Rule(words, lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None)


def one_of(values: Collection[str]) -> Rule:
    return Rule(f"one of {', '.join(values)}", lambda value: isinstance(value, str) and value in values)


MASKS = Rule(
    '"auto", "full" or an integer of 0 or more',
    lambda value: value in ("auto", "full") or is_integer(value, 0),
    "auto|full|N",
)
