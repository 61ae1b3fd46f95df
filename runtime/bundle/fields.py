"""Reading dataclasses from untrusted JSON. The annotations say what each field may be; the reader collects
every problem.
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
DEEPEST = 32  # levels of nesting in fields of any JSON, such as a profile's evidence
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of a field, in its annotation: `Annotated[int, Bounds(1, 4096)]`.

    Integers are in `low ... high`, and below the integer field at the path `below`. Strings are one of
    `choices`. A list or object has at most `most` entries. `absent` is the value of a missing or null field.
    """

    low: int = 0
    high: int = 2**53
    below: str = ""
    choices: tuple[str, ...] = ()
    most: int = 100_000
    absent: Any = None


def parse(text: str) -> Any:
    """Parse JSON. Repeated names and lone surrogates raise ValueError; deep nesting raises RecursionError."""
    value = json.loads(text, object_pairs_hook=_once)
    if SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        name = next(name for name in value if names.count(name) > 1)
        raise ValueError(f"the name {name[:60]!r} is given twice")
    return value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


class Reader:
    """Reads one document. A wrong field adds to `problems` and gets a harmless value."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        self._integers: dict[str, int] = {}

    def read(self, kind: type[T], value: Any, where: str, path: str = "") -> T:
        """Read a dataclass `kind` from the JSON object at `where`. Its method `contradictions`, if any,
        yields the fields that contradict each other.
        """
        source = self._object(value, where)
        values = {}
        for field in dataclasses.fields(kind):  # type: ignore[arg-type]
            hint = _hints(kind)[field.name]  # type: ignore[arg-type]
            inner = f"{path}.{field.name}".lstrip(".")
            values[field.name] = self._value(hint, source.get(field.name), f"{where}.{field.name}", inner)
        result = kind(**values)
        for name, what in getattr(result, "contradictions", tuple)():
            self._note(f"{where}.{name}".rstrip("."), what)
        return result

    def _note(self, where: str, what: str) -> None:
        self.problems.append(f"{where}: {what}")

    def _object(self, value: Any, where: str) -> Mapping[str, Any]:
        if isinstance(value, dict):
            return value
        self._note(where, f"an object is expected, not {_shown(value)}")
        return {}

    def _value(self, hint: Any, value: Any, where: str, path: str, limits: Bounds = Bounds()) -> Any:
        origin, inner = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return self._value(inner[0], value, where, path, inner[1])
        if origin in (Union, UnionType):
            if value is None and (NoneType in inner or limits.absent is not None):
                return limits.absent
            words = [word for kind in inner if get_origin(kind) is Literal for word in get_args(kind)]
            if value in words and isinstance(value, str):
                return value
            rest = next(kind for kind in inner if kind is not NoneType and get_origin(kind) is not Literal)
            return self._value(rest, value, where, path, limits)
        if origin is tuple:
            if value is None and limits.absent is not None:
                return limits.absent
            return self._list(inner[0], value, where, limits)
        if origin is not None and issubclass(origin, Mapping):
            return self._mapping(inner[1], value, where, limits)
        if hint is int:
            self._integers[path] = self._integer(value, where, limits)
            return self._integers[path]
        scalars = {float: self._number, bool: self._boolean, str: self._text}
        return scalars[hint](value, where, limits) if hint in scalars else self.read(hint, value, where, path)

    def _list(self, hint: Any, value: Any, where: str, limits: Bounds) -> tuple[Any, ...]:
        if not isinstance(value, list):
            self._note(where, f"a list is expected, not {_shown(value)}")
            return ()
        if len(value) > limits.most:
            self._note(where, f"at most {limits.most} entries are expected, not {len(value)}")
            return ()
        plain, *meta = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if plain not in (int, str):
            return tuple(self._value(hint, v, f"{where}[{i}]", "") for i, v in enumerate(value))
        low, high = self._bounds(meta[0] if meta else limits)
        good = [
            v for v in value if (is_integer(v) and low <= v <= high if plain is int else isinstance(v, str))
        ]
        if len(good) != len(value):
            what = f"integers of {low} to {high}" if plain is int else "strings"
            self._note(where, f"{what} are expected")
        return tuple(good)

    def _mapping(self, hint: Any, value: Any, where: str, limits: Bounds) -> Mapping[str, Any]:
        entries = self._object(value, where)
        if len(entries) > limits.most:
            self._note(where, f"at most {limits.most} entries are expected, not {len(entries)}")
            return {}
        if hint is Any:
            if problem := _unusable(entries):
                self._note(where, problem)
                return {}
            return entries
        if hint is not str:
            return {name: self._value(hint, v, f"{where}.{name}", "") for name, v in entries.items()}
        for name, text in entries.items():
            if not isinstance(text, str):
                self._note(f"{where}.{name}", f"a string is expected, not {_shown(text)}")
        return {name: text for name, text in entries.items() if isinstance(text, str)}

    def _bounds(self, limits: Bounds) -> tuple[int, int]:
        return limits.low, self._integers.get(limits.below, 1) - 1 if limits.below else limits.high

    def _integer(self, value: Any, where: str, limits: Bounds) -> int:
        low, high = self._bounds(limits)
        if not is_integer(value) or not low <= value <= high:
            self._note(where, f"an integer of {low} to {high} is expected, not {_shown(value)}")
            return low
        return int(value)

    def _number(self, value: Any, where: str, _: Bounds) -> float:
        # Compared, not converted: an integer may be too large for a float.
        if not (is_integer(value) or isinstance(value, float)) or not -LARGEST <= value <= LARGEST:
            self._note(where, f"a finite number is expected, not {_shown(value)}")
            return 0.0
        return float(value)

    def _boolean(self, value: Any, where: str, _: Bounds) -> bool:
        if not isinstance(value, bool):
            self._note(where, f"true or false is expected, not {_shown(value)}")
        return value is True

    def _text(self, value: Any, where: str, limits: Bounds) -> str:
        if not isinstance(value, str) or not value:
            self._note(where, f"a non-empty string is expected, not {_shown(value)}")
            return limits.choices[0] if limits.choices else "?"
        if limits.choices and value not in limits.choices:
            self._note(where, f"`{value[:60]}` is not one of {', '.join(limits.choices)}")
        return value


def _unusable(value: Any, depth: int = 0) -> str:
    """Why a value of any JSON cannot be stored: a number that JSON lacks, or too deep a nesting."""
    if isinstance(value, float) and not -LARGEST <= value <= LARGEST:
        return "a number in it is not finite"
    if depth > DEEPEST:
        return f"more than {DEEPEST} levels"
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((problem for v in inner if (problem := _unusable(v, depth + 1))), "")


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    try:
        text = repr(value)
    except RecursionError:
        return "something that is nested too deeply"
    return text if len(text) <= 60 else f"{text[:57]}..."
