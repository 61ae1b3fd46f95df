"""JSON schemas as regular expressions. Keywords that need more than a regular language are refused by name.

The language equals that of llguidance for the same schema (tests/runtime/structured/test_regular.py compares
both): properties in the schema's order, one form of white space, and only the escapes that are needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from ...errors import SessionError
from ...rules import is_integer
from ..grammar import NOTES, simplified
from .expression import (
    EMPTY,
    Expression,
    Literal,
    Repeat,
    characters,
    choice,
    optional,
    pattern_expression,
    sequence,
    text,
)

Separators = tuple[str, str]

OWN = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength"},
    "integer": {"minimum", "maximum"},
    "number": set[str](),
    "boolean": set[str](),
    "null": set[str](),
}
MAX_TIMES = 100_000  # of items, of characters
MAX_BOUND = 2**63 - 1

SHORT = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
CONTROLS = [*range(0x20), 0x7F]
NUMBER = pattern_expression(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
BOOLEAN = pattern_expression("true|false")
# Any character of a string: the texts of `_written`, with common beginnings.
CHARACTER = pattern_expression(r'[^"\\\x00-\x1f\x7f]|\\(["\\bfnrt]|u00([01][0-9a-fA-F]|7[fF]))')


class Schemas:
    """Expressions of one schema and its parts. Local references start at `root`."""

    def __init__(self, root: Any, separators: Separators) -> None:
        self._root = root
        self._item, self._key = (text(separator) for separator in separators)
        self._open: list[str] = []  # references that are being followed
        self._known: dict[str, Expression] = {}

    def expression(self, schema: Any, where: str) -> Expression:
        """The expression of a schema. Raises a SessionError that names the first unsupported part."""
        if not isinstance(schema, Mapping):
            raise _beyond(where, f"`{json.dumps(schema)[:40]}` allows anything or nothing")
        keys = set(schema) - NOTES
        for keyword in ("$ref", "anyOf", "const", "enum"):
            if keyword in keys:
                return self._combined(keyword, schema, keys, where)
        kinds = schema.get("type")
        if kinds is None:
            if keys - {"type"}:
                raise _beyond(where, f"{_names(keys)} without a `type`")
            raise _beyond(where, "a schema without a `type`, which allows anything")
        kinds = list(kinds) if isinstance(kinds, list | tuple) else [kinds]
        if not kinds or any(not isinstance(kind, str) or kind not in OWN for kind in kinds):
            raise _beyond(where, f"type {json.dumps(schema['type'])[:60]}")
        if strange := keys - {"type"}.union(*(OWN[kind] for kind in kinds)):
            raise _beyond(where, _names(strange))
        return choice([self._of_kind(kind, schema, where) for kind in kinds])

    def literal(self, value: Any) -> Expression:
        """All texts of one value."""
        if isinstance(value, str):
            return sequence(Literal(b'"'), *map(_written, value), Literal(b'"'))
        if isinstance(value, Mapping):
            items = [sequence(self._name(name), self.literal(inner)) for name, inner in value.items()]
            return sequence(Literal(b"{"), *self._joined(items), Literal(b"}"))
        if isinstance(value, list | tuple):
            return sequence(
                Literal(b"["), *self._joined([self.literal(inner) for inner in value]), Literal(b"]")
            )
        if isinstance(value, float):
            return text(f"{Decimal(repr(value)):f}".removesuffix(".0"))
        return text(json.dumps(value))

    def _combined(self, keyword: str, schema: Mapping[str, Any], keys: set[str], where: str) -> Expression:
        """A schema that `keyword` determines rather than `type`."""
        if beside := keys - {keyword, "type"} or (
            keys - {keyword} if keyword in ("$ref", "anyOf") else set()
        ):
            raise _beyond(where, f"{_names(beside)} beside `{keyword}`")
        value = schema[keyword]
        if keyword == "$ref":
            return self._referred(value, where)
        if keyword == "anyOf":
            if not isinstance(value, list) or not value:
                raise _beyond(where, "an empty `anyOf`")
            return choice([self.expression(option, f"{where}.anyOf[{i}]") for i, option in enumerate(value)])
        values = [value] if keyword == "const" else value
        if not isinstance(values, list):
            raise _beyond(where, "an `enum` that is not a list")
        kinds = schema.get("type")
        kinds = kinds if isinstance(kinds, list) or kinds is None else [kinds]
        fitting = [v for v in values if kinds is None or _kinds_of(v) & set(map(str, kinds))]
        if not fitting:
            raise _beyond(where, f"`{keyword}`: nothing satisfies it")
        return choice([self.literal(v) for v in fitting])

    def _referred(self, reference: Any, where: str) -> Expression:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise _beyond(where, f"`$ref` to {json.dumps(reference)[:60]}: references stay inside the schema")
        if reference in self._open:
            raise _beyond(where, f"recursion by `$ref` {reference[:60]}")
        if reference in self._known:
            return self._known[reference]
        target = self._root
        for part in reference.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or key not in target:
                raise SessionError(f"{where}: `$ref` {reference[:60]} leads nowhere; correct the schema")
            target = target[key]
        self._open.append(reference)
        self._known[reference] = self.expression(target, reference)
        self._open.pop()
        return self._known[reference]

    def _of_kind(self, kind: str, schema: Mapping[str, Any], where: str) -> Expression:
        if kind == "object":
            return self._object(schema, where)
        if kind == "array":
            return self._array(schema, where)
        if kind == "string":
            minimum, maximum = _counts(schema, "minLength", "maxLength", where)
            return sequence(Literal(b'"'), Repeat(CHARACTER, minimum, maximum), Literal(b'"'))
        if kind == "integer":
            return _integers(schema, where)
        if kind == "number":
            return NUMBER
        return BOOLEAN if kind == "boolean" else Literal(b"null")

    def _object(self, schema: Mapping[str, Any], where: str) -> Expression:
        if schema.get("additionalProperties", True) is not False:
            raise _beyond(where, "`additionalProperties` other than false")
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise _beyond(where, "`properties` and `required` other than an object and a list")
        if missing := sorted(set(map(str, required)) - set(properties)):
            raise _beyond(where, f"`required` names {', '.join(missing)[:60]}, which `properties` lacks")
        items = [
            (sequence(self._name(name), self.expression(inner, f"{where}.{name}")), name in required)
            for name, inner in properties.items()
        ]
        # From the last property to the first: the rest after another property (with a separator), and the
        # rest if no property is written yet.
        after: Expression = EMPTY
        first: Expression = EMPTY
        for item, is_required in reversed(items):
            begun = sequence(item, after)
            first = begun if is_required else choice([begun, first])
            separated = sequence(self._item, item)
            after = sequence(separated if is_required else optional(separated), after)
        return sequence(Literal(b"{"), first, Literal(b"}"))

    def _array(self, schema: Mapping[str, Any], where: str) -> Expression:
        if "items" not in schema:
            raise _beyond(where, "an array without `items`, which holds anything")
        minimum, maximum = _counts(schema, "minItems", "maxItems", where)
        if maximum == 0:
            return Literal(b"[]")
        item = self.expression(schema["items"], f"{where}.items")
        rest = Repeat(
            sequence(self._item, item), max(minimum - 1, 0), None if maximum is None else maximum - 1
        )
        inner = sequence(item, rest)
        return sequence(Literal(b"["), inner if minimum else optional(inner), Literal(b"]"))

    def _name(self, name: str) -> Expression:
        """A property's name and the separator after it."""
        return sequence(text(json.dumps(name, ensure_ascii=False)), self._key)

    def _joined(self, items: Sequence[Expression]) -> Iterator[Expression]:
        for i, item in enumerate(items):
            if i:
                yield self._item
            yield item


def schema_expression(schema: Any, separators: Separators, where: str = "schema") -> Expression:
    """The answers that satisfy a JSON schema. Raises SessionError for schemas beyond the regular subset."""
    schema = simplified(schema)
    return Schemas(schema, separators).expression(schema, where)


def _written(character: str) -> Expression:
    """All texts of a character in a string."""
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:
        raise SessionError("a value of the schema holds a lone surrogate; correct it")
    spellings = [f"\\{SHORT[character]}"] if character in SHORT else []
    if code in CONTROLS:
        spellings += [f"\\u{first}{second}" for first in [f"00{code >> 4:x}"] for second in _cases(code & 15)]
    return choice([text(way) for way in spellings]) if spellings else text(character)


def _cases(digit: int) -> list[str]:
    return sorted({f"{digit:x}", f"{digit:X}"})


def _integers(schema: Mapping[str, Any], where: str) -> Expression:
    minimum, maximum = (_bound(schema, name, where, -MAX_BOUND, MAX_BOUND) for name in ("minimum", "maximum"))
    if minimum is not None and maximum is not None and minimum > maximum:
        raise _beyond(where, f"integers from {minimum} to {maximum} do not exist")
    # As in llguidance, -0 is an integer if both bounds are open, or if it is between them.
    has_minus_zero = (minimum is None) == (maximum is None) and (minimum or -1) < 0 <= (
        1 if maximum is None else maximum
    )
    options = []
    if minimum is None or minimum < 0:
        first = 0 if has_minus_zero else max(1, 1 if maximum is None else -maximum)
        options.append(sequence(Literal(b"-"), _numerals(first, None if minimum is None else -minimum)))
    if maximum is None or maximum >= 0:
        options.append(_numerals(max(0, minimum or 0), maximum))
    return choice(options)


def _numerals(minimum: int, maximum: int | None) -> Expression:
    """Nonnegative integers as digits without leading zeros."""
    size = len(str(minimum))
    if maximum is None:
        more = sequence(characters([(49, 57)]), Repeat(characters([(48, 57)]), size, None))
        return choice([_numerals(minimum, 10**size - 1), more])
    options = []
    for length in range(size, len(str(maximum)) + 1):
        low, high = max(minimum, 10 ** (length - 1) if length > 1 else 0), min(maximum, 10**length - 1)
        options.append(_between(str(low), str(high)))
    return choice(options)


def _between(low: str, high: str) -> Expression:
    """Integers from `low` to `high`, which have the same number of digits."""
    if low == high:
        return text(low)
    if low[0] == high[0]:
        return sequence(text(low[0]), _between(low[1:], high[1:]))
    rest = len(low) - 1
    if not rest:
        return characters([(ord(low), ord(high))])
    options = [
        sequence(text(low[0]), _between(low[1:], "9" * rest)),
        sequence(text(high[0]), _between("0" * rest, high[1:])),
    ]
    if int(high[0]) - int(low[0]) > 1:
        inner = characters([(ord(low[0]) + 1, ord(high[0]) - 1)])
        options.append(sequence(inner, Repeat(characters([(48, 57)]), rest, rest)))
    return choice(options)


def _counts(schema: Mapping[str, Any], minimum: str, maximum: str, where: str) -> tuple[int, int | None]:
    low, high = (_bound(schema, name, where, 0, MAX_TIMES) for name in (minimum, maximum))
    if high is not None and (low or 0) > high:
        raise _beyond(where, f"`{minimum}` {low} and `{maximum}` {high}: nothing satisfies both")
    return low or 0, high


def _bound(schema: Mapping[str, Any], name: str, where: str, low: int, high: int) -> int | None:
    value = schema.get(name)
    if name not in schema:
        return None
    if not is_integer(value, low) or value > high:
        raise _beyond(where, f"`{name}` {json.dumps(value)[:40]}; it may be an integer of {low} to {high}")
    return value


def _kinds_of(value: Any) -> set[str]:
    if value is None or isinstance(value, bool):
        return {"null"} if value is None else {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if float(value).is_integer() else {"number"}
    return {"string"} if isinstance(value, str) else {"object"} if isinstance(value, Mapping) else {"array"}


def _names(keys: set[str]) -> str:
    return ", ".join(f"`{key[:40]}`" for key in sorted(map(str, keys))[:5])


def _beyond(where: str, what: str) -> SessionError:
    return SessionError(
        f"{where[:200]}: {what}: stored grammars do not support it (docs/structured.md has the list); change"
        " the schema, or send it with each request"
    )
