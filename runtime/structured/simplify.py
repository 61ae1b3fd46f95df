"""The parts of a JSON schema that constrain an answer, in the form that llguidance takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The formats of strings that llguidance knows. By the standard, any other is an annotation.
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
NOTES = {"$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default"} | {
    "examples", "deprecated", "readOnly", "writeOnly",
}  # fmt: skip
NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # schemas by a name
NOT_SCHEMAS = {"const", "enum", "default", "examples"}
LOWER, UPPER = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
LARGEST = 2**63 - 512  # as a float, 2**63
MAX_COUNT = 2**31


def simplified(schema: Any) -> Any:
    """A copy of a schema without what allows everything: unknown formats, `propertyNames` that only says "a
    string", `uniqueItems` false, and bounds beyond int64.
    """
    if isinstance(schema, list):
        return [simplified(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, Mapping):
            value = {name: simplified(part) for name, part in value.items()}
        elif key in COUNTS and isinstance(value, float) and value.is_integer():
            value = int(value)
        elif key not in NOT_SCHEMAS:
            value = simplified(value)
        if not _allows_all(key, value, schema):
            made[key] = value
    return made


def _allows_all(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if key == "format":
        kinds = schema.get("type", "string")
        is_text = "string" in kinds if isinstance(kinds, list | str) else True
        return isinstance(value, str) and (value not in FORMATS or not is_text)
    if key == "propertyNames":
        names = {k: v for k, v in value.items() if k not in NOTES} if isinstance(value, Mapping) else value
        return names in (True, {}, {"type": "string"}, {"type": ["string"]})
    if key == "uniqueItems":
        return value is False
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    if key in COUNTS:
        return key.startswith("max") and value >= MAX_COUNT
    return (key in LOWER and value <= -LARGEST) or (key in UPPER and value >= LARGEST)
