"""Fields of request bodies. A table says how each field is read; other fields are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..refusals import Refused

Reader = Callable[[str, Any], Any]
"""Checks the value of a field by its name, and returns it as the server uses it. None: it has no effect."""


class Several(dict[str, Any]):
    """What one field gives for several names."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a body. `into`: the name of its value, if it differs from the field's."""

    read: Reader
    into: str | None = None
    is_needed: bool = False


Table = Mapping[str, Field]


def read_fields(body: Mapping[str, Any], table: Table) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a body's fields by their names, and the field of each name. A null field counts as
    absent. If two fields give the same value, the later one of the table counts.

    Raises Refused for an unknown or missing field, and for an invalid value.
    """
    values: dict[str, Any] = {}
    names = {field.into or name: name for name, field in table.items()}
    for name in body:
        if name not in table and body[name] is not None:
            raise Refused(
                400, f"unknown field {name[:60]!r}; remove it, or correct its name", param=name[:60]
            )
    for name, field in table.items():
        if body.get(name) is None:
            if field.is_needed:
                raise Refused(400, f"{name} is missing", param=name)
            continue
        value = field.read(name, body[name])
        found = value if isinstance(value, Several) else {field.into or name: value}
        found = {into: given for into, given in found.items() if given is not None}
        values |= found
        names |= dict.fromkeys(found, name)
    return values, names


# --- readers ---


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong(name, "a text", value)
    return value


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(name, "true or false", value)
    return value


def number(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong(name, "a number", value)
    return value


def integer(low: int | None = None, high: int | None = None) -> Reader:
    """A reader of integers of `low` to `high`."""
    limits = "" if low is None else f" of {low} or more" if high is None else f" of {low} to {high}"

    def read(name: str, value: Any) -> int:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or (low is not None and value < low) or (high is not None and value > high):
            raise wrong(name, f"an integer{limits}", value)
        return int(value)

    return read


def a_dict(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    return value


def a_list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise wrong(name, "a list", value)
    return value


def texts(name: str, value: Any) -> tuple[str, ...]:
    """One text or a list of them."""
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(item, str) for item in found):
        raise wrong(name, "a text or a list of texts", value)
    return tuple(found)


def one_of(*known: str) -> Reader:
    def read(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            raise wrong(name, ", ".join(map(json.dumps, known)), value)
        return value

    return read


def ignored(_name: str, _value: Any) -> None:
    """A field that does not change the answer."""


def unsupported(*neutral: Any) -> Reader:
    """A reader of a field that would change the answer, unless it has one of the values `neutral`."""

    def read(name: str, value: Any) -> None:
        if not any(_is_same(value, other) for other in neutral):
            raise _refused(name, f" (except {json.dumps(neutral[0])})" if neutral else "")

    return read


def inner(table: Table) -> Reader:
    """A reader of an object whose fields are those of `table`."""

    def read(name: str, value: Any) -> Several:
        try:
            return Several(read_fields(a_dict(name, value), table)[0])
        except Refused as refusal:
            if refusal.param == name:
                raise
            raise Refused(400, f"{name}: {refusal}", param=name, code=refusal.code) from None

    return read


def _refused(name: str, note: str) -> Refused:
    return Refused(
        400,
        f"{name} is not supported{note} and would change the answer; remove it",
        param=name,
        code="unsupported_parameter",
    )


def wrong(name: str, what: str, value: object) -> Refused:
    """`name` is a field, or a place in it: the param of an error is the field."""
    return Refused(400, f"{name} must be {what}, not {shown(value)}", param=name.partition("[")[0])


def shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return repr(value)[:80]


def _is_same(value: object, neutral: object) -> bool:
    """Equality, in which 0 differs from False."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
