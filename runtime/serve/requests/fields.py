"""Fields of request bodies. A table says how each field is read; other fields are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...rules import is_integer
from ..refusals import Refused

Reader = Callable[[str, Any], Any]
"""Checks the value of a field by its name, and returns it as the server uses it. None: it has no effect."""


class Several(dict[str, Any]):
    """Values for several names, from one field."""


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
    body = {name: value for name, value in body.items() if value is not None}
    if unknown := [name[:60] for name in body if name not in table]:
        raise Refused(400, f"unknown field {unknown[0]!r}; remove it, or correct its name", param=unknown[0])
    values: dict[str, Any] = {}
    names = {field.into or name: name for name, field in table.items()}
    for name, field in table.items():
        if name in body:
            value = field.read(name, body[name])
            several = value if isinstance(value, Several) else {field.into or name: value}
            for into, content in several.items():
                if content is not None:
                    values[into], names[into] = content, name
        elif field.is_needed:
            raise Refused(400, f"{name} is missing", param=name)
    return values, names


# --- readers ---


def setting(_name: str, value: Any) -> Any:
    """A field of GenerationConfig, which checks it."""
    return value


def of_type(kind: type, words: str) -> Reader:
    def read(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise wrong(name, words, value)
        return value

    return read


text = of_type(str, "a text")
flag = of_type(bool, "true or false")
a_dict = of_type(dict, "an object")
a_list = of_type(list, "a list")


def integer(low: int, high: int | None = None) -> Reader:
    """A reader of integers of `low` to `high`."""
    limits = f" of {low} or more" if high is None else f" of {low} to {high}"

    def read(name: str, value: Any) -> int:
        if not is_integer(value, low) or (high is not None and value > high):
            raise wrong(name, f"an integer{limits}", value)
        return value

    return read


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
        if value not in neutral:
            note = f" (except {json.dumps(neutral[0])})" if neutral else ""
            reason = f"is not supported{note} and would change the answer; remove it"
            raise unsupported_value(name, f"{name} {reason}")

    return read


def read_fields_in(name: str, value: Any, table: Table) -> tuple[dict[str, Any], dict[str, str]]:
    """`read_fields` of the object in the field `name`, which is the param of errors."""
    fields = a_dict(name, value)
    try:
        return read_fields(fields, table)
    except Refused as refusal:
        raise Refused(400, f"{name}: {refusal}", param=name, code=refusal.code) from None


def inner(table: Table) -> Reader:
    """A reader of an object whose fields are those of `table`."""
    return lambda name, value: Several(read_fields_in(name, value, table)[0])


def unsupported_value(name: str, message: str) -> Refused:
    return Refused(400, message, param=name, code="unsupported_parameter")


def wrong(name: str, what: str, value: object) -> Refused:
    """`name` is a field, or a place in it: the param of an error is the field."""
    return Refused(400, f"{name} must be {what}, not {shown(value)}", param=name.partition("[")[0])


def shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return repr(value)[:80]
