"""Reading dataclasses from untrusted JSON. The annotations say what each field may be (rules.py); the reader
collects every problem.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ..rules import LARGEST, Rule, integer, number

DEEPEST = 32  # levels of nesting in fields of any JSON, such as a profile's evidence
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
SCALARS: dict[Any, Rule] = {
    bool: Rule("true or false", lambda value: isinstance(value, bool)),
    int: integer(0, high=2**53),
    float: number("a finite number", -LARGEST),
    str: Rule("a non-empty string", lambda value: isinstance(value, str) and value != ""),
}
AnyText = Annotated[str, Rule("a string", lambda value: isinstance(value, str))]


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


class FieldParser:
    """Reads one document. A wrong field adds to `problems`."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def read(self, kind: Any, value: Any, where: str) -> Any:
        """Read a dataclass `kind` from the JSON object at `where`, None if a field is wrong. A field that is
        missing or null has its default. The method `contradictions` of `kind`, if any, yields the fields that
        contradict each other.
        """
        if not isinstance(value, dict):
            return self._expected("an object", value, where)
        values, before = {}, len(self.problems)
        for field in fields(kind):
            content = value.get(field.name)
            if content is not None or field.default is field.default_factory is MISSING:
                hint = _hints(kind)[field.name]
                values[field.name] = self._value(hint, content, f"{where}.{field.name}")
        if len(self.problems) > before:
            return None
        result = kind(**values)
        for name, what in getattr(result, "contradictions", tuple)():
            self.problems.append(f"{where}.{name}".rstrip(".") + f": {what}")
        return result

    def _expected(self, words: str, value: Any, where: str) -> Any:
        shown = "nothing" if value is None else reprlib.repr(value)
        self.problems.append(f"{where}: {words} is expected, not {shown}")
        return None

    def _value(self, hint: Any, value: Any, where: str) -> Any:
        rule = None
        if get_origin(hint) is Annotated:
            hint, rule = get_args(hint)
        if get_origin(hint) in (Union, UnionType):
            kinds = get_args(hint)
            if value is None and NoneType in kinds:
                return None
            hint = next(kind for kind in kinds if kind is not NoneType and get_origin(kind) is not Literal)
        if is_dataclass(hint):
            return self.read(hint, value, where)
        origin, inner = get_origin(hint), get_args(hint)
        if origin is tuple:
            if not isinstance(value, list):
                return self._expected("a list", value, where)
            if rule is not None and not rule.holds(value):
                return self._expected(rule.words, value, where)
            return tuple(self._value(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value))
        if origin is not None:
            return self._mapping(inner[1], value, where)
        rule = rule or SCALARS[hint]
        if not rule.holds(value):
            return self._expected(rule.words, value, where)
        return float(value) if hint is float else value

    def _mapping(self, hint: Any, value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            return self._expected("an object", value, where)
        if hint is not Any:
            return {name: self._value(hint, inner, f"{where}.{name}") for name, inner in value.items()}
        if problem := _unusable(value):
            self.problems.append(f"{where}: {problem}")
        return value


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _unusable(value: Any, depth: int = 0) -> str:
    """Why a value of any JSON cannot be stored: a number that JSON lacks, or too deep a nesting."""
    if isinstance(value, float) and not -LARGEST <= value <= LARGEST:
        return "a number in it is not finite"
    if depth > DEEPEST:
        return f"more than {DEEPEST} levels"
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((problem for v in inner if (problem := _unusable(v, depth + 1))), "")
