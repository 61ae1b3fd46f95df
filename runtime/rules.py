"""What an option's values may be, said in its annotation: `Annotated[int, integer(1)]`. Knows no option."""

from __future__ import annotations

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
    """Whether a value is right, and what one is in words."""

    words: str
    holds: Callable[[Any], bool]


def broken(value: Any) -> dict[str, str]:
    """What is wrong with the fields of a dataclass, by the rules in its annotations: words by name. None is
    right where the annotation allows it.
    """
    kind: Any = type(value)
    given = {name: getattr(value, name) for name in _rules(kind)}
    return {
        name: f"{name} must be {rule.words}, not {given[name]!r}"
        for name, (rule, may_be_none) in _rules(kind).items()
        if not (given[name] is None and may_be_none) and not rule.holds(given[name])
    }


@cache
def _rules(kind: Any) -> dict[str, tuple[Rule, bool]]:
    hints = get_type_hints(kind, include_extras=True).items()
    ruled = {name: get_args(hint) for name, hint in hints if get_origin(hint) is Annotated}
    return {name: (rule, NoneType in get_args(inner)) for name, (inner, rule) in ruled.items()}


def is_integer(value: object, low: float = -inf) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def is_number(value: object) -> TypeGuard[float]:
    """A finite one, which a float holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def integer(low: int, words: str = "") -> Rule:
    return Rule(words or f"an integer of {low} or more", lambda value: is_integer(value, low))


def number(words: str, low: float = 0, high: float = inf, *, above: bool = False) -> Rule:
    """`above`: `low` itself is wrong."""
    return Rule(words, lambda v: is_number(v) and low <= v <= high and not (above and v == low))


def one_of(values: Collection[str]) -> Rule:
    return Rule(f"one of {', '.join(values)}", lambda value: isinstance(value, str) and value in values)
