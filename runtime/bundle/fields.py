"""Typed reading of untrusted JSON: a dataclass's annotations say what each field may be, and every wrong
field is noted.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..rules import is_integer

T = TypeVar("T")
LARGEST = sys.float_info.max
DEEPEST = 32  # of what is kept as it stands, such as a profile's evidence
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class Rule:
    """What a type does not say by itself: `Annotated[int, Rule(1, 4096)]`.

    Integers lie in `low ... high`, and below the integer field at the path `below`. `choices` are the strings
    there are, `most` the entries of a list or object. `absent` is what null or nothing means.
    """

    low: int = 0
    high: int = 2**53
    below: str = ""
    choices: tuple[str, ...] = ()
    most: int = 100_000
    absent: Any = None


def parse(text: str) -> Any:
    """JSON without names given twice and without half characters. Raises ValueError or RecursionError."""
    value = json.loads(text, object_pairs_hook=_once)
    if SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in value if names.count(name) > 1)
        raise ValueError(f"the name {twice[:60]!r} is given twice")
    return value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


class Reader:
    """Reads one document. What is wrong goes to `problems`; the value in its place is harmless."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        self._integers: dict[str, int] = {}

    def read(self, kind: type[T], value: Any, where: str, path: str = "") -> T:
        """A `kind` (a dataclass) from the JSON object at `where`.

        Its method `wrong`, if any, names fields that contradict.
        """
        given = self._object(value, where)
        values = {}
        for field in dataclasses.fields(kind):  # type: ignore[arg-type]
            hint = _hints(kind)[field.name]  # type: ignore[arg-type]
            inner = f"{path}.{field.name}".lstrip(".")
            values[field.name] = self._value(hint, given.get(field.name), f"{where}.{field.name}", inner)
        made = kind(**values)
        for name, what in getattr(made, "wrong", tuple)():
            self._note(f"{where}.{name}".rstrip("."), what)
        return made

    def _note(self, where: str, what: str) -> None:
        self.problems.append(f"{where}: {what}")

    def _object(self, value: Any, where: str) -> Mapping[str, Any]:
        if isinstance(value, dict):
            return value
        self._note(where, f"an object is expected, not {_shown(value)}")
        return {}

    def _value(self, hint: Any, value: Any, where: str, path: str, rule: Rule = Rule()) -> Any:
        origin, inner = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return self._value(inner[0], value, where, path, inner[1])
        if origin in (Union, UnionType):
            if value is None and (NoneType in inner or rule.absent is not None):
                return rule.absent
            words = [word for kind in inner if get_origin(kind) is Literal for word in get_args(kind)]
            if value in words and isinstance(value, str):
                return value
            rest = next(kind for kind in inner if kind is not NoneType and get_origin(kind) is not Literal)
            return self._value(rest, value, where, path, rule)
        if origin is tuple:
            if value is None and rule.absent is not None:
                return rule.absent
            return self._list(inner[0], value, where, rule)
        if origin is not None and issubclass(origin, Mapping):
            return self._mapping(inner[1], value, where, rule)
        if hint is int:
            self._integers[path] = self._integer(value, where, rule)
            return self._integers[path]
        scalars = {float: self._number, bool: self._boolean, str: self._text}
        return scalars[hint](value, where, rule) if hint in scalars else self.read(hint, value, where, path)

    def _list(self, hint: Any, value: Any, where: str, rule: Rule) -> tuple[Any, ...]:
        if not isinstance(value, list):
            self._note(where, f"a list is expected, not {_shown(value)}")
            return ()
        if len(value) > rule.most:
            self._note(where, f"at most {rule.most} entries are expected, not {len(value)}")
            return ()
        plain, *meta = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if plain not in (int, str):
            return tuple(self._value(hint, v, f"{where}[{i}]", "") for i, v in enumerate(value))
        low, high = self._bounds(meta[0] if meta else rule)
        good = [
            v for v in value if (is_integer(v) and low <= v <= high if plain is int else isinstance(v, str))
        ]
        if len(good) != len(value):
            what = f"integers of {low} to {high}" if plain is int else "strings"
            self._note(where, f"{what} are expected")
        return tuple(good)

    def _mapping(self, hint: Any, value: Any, where: str, rule: Rule) -> Mapping[str, Any]:
        given = self._object(value, where)
        if len(given) > rule.most:
            self._note(where, f"at most {rule.most} entries are expected, not {len(given)}")
            return {}
        if hint is Any:
            if odd := _oddity(given):
                self._note(where, odd)
                return {}
            return given
        if hint is not str:
            return {name: self._value(hint, v, f"{where}.{name}", "") for name, v in given.items()}
        for name, text in given.items():
            if not isinstance(text, str):
                self._note(f"{where}.{name}", f"a string is expected, not {_shown(text)}")
        return {name: text for name, text in given.items() if isinstance(text, str)}

    def _bounds(self, rule: Rule) -> tuple[int, int]:
        return rule.low, self._integers.get(rule.below, 1) - 1 if rule.below else rule.high

    def _integer(self, value: Any, where: str, rule: Rule) -> int:
        low, high = self._bounds(rule)
        if not is_integer(value) or not low <= value <= high:
            self._note(where, f"an integer of {low} to {high} is expected, not {_shown(value)}")
            return low
        return int(value)

    def _number(self, value: Any, where: str, _: Rule) -> float:
        # Compared, not converted: an integer may be too large for a float.
        if not (is_integer(value) or isinstance(value, float)) or not -LARGEST <= value <= LARGEST:
            self._note(where, f"a finite number is expected, not {_shown(value)}")
            return 0.0
        return float(value)

    def _boolean(self, value: Any, where: str, _: Rule) -> bool:
        if not isinstance(value, bool):
            self._note(where, f"true or false is expected, not {_shown(value)}")
        return value is True

    def _text(self, value: Any, where: str, rule: Rule) -> str:
        if not isinstance(value, str) or not value:
            self._note(where, f"a non-empty string is expected, not {_shown(value)}")
            return rule.choices[0] if rule.choices else "?"
        if rule.choices and value not in rule.choices:
            self._note(where, f"`{value[:60]}` is not one of {', '.join(rule.choices)}")
        return value


def _oddity(value: Any, depth: int = 0) -> str:
    """Why a value cannot be kept as it stands: what JSON has no number for, or what would not
    come back out.
    """
    if isinstance(value, float) and not -LARGEST <= value <= LARGEST:
        return "a number in it is not finite"
    if depth > DEEPEST:
        return f"more than {DEEPEST} levels"
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((odd for v in inner if (odd := _oddity(v, depth + 1))), "")


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    try:
        text = repr(value)
    except RecursionError:
        return "something that is nested too deeply"
    return text if len(text) <= 60 else f"{text[:57]}..."
