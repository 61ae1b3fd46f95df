"""The format that a request requires of its answer: schema, regex, choice, tools, separators, grammar.

Values are checked here, and bounded where compiling them would take minutes or gigabytes.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from .rules import Rule

MAX_BYTES = 1_000_000  # of a schema, of tools
MAX_CHARACTERS = 100_000  # of all choices together
MAX_REGEX = 2048  # characters of a regex, and of a pattern in a schema
MAX_EXPANDED = 20_000  # characters of a regex with its repetitions {n} written out
MAX_MULTIPLE = 100_000  # of multipleOf
MAX_CHOICES, MAX_TOOLS = 10_000, 1000
MAX_CONSTANTS = 200_000  # characters of all constants and enums of a schema
MAX_PROPERTIES, MAX_PER_OBJECT = 5000, 500  # of a schema, and of one object: compiling is quadratic
MAX_DEPTH = 64  # objects and lists inside one another

PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{[0-9]{0,9},?[0-9]{0,9}\}|.", re.DOTALL)
COUNTS = re.compile(r"\{([0-9]+)?,?([0-9]+)?\}")

JSON_FORMS: dict[str, tuple[tuple[type, ...], str]] = {
    "schema": ((dict, bool), "a JSON schema, an object or its text"),
    "tools": ((list,), "a list of functions in OpenAI's form, or its text"),
}
CACHED = 32  # texts whose problems are known: a copy of a config does not check them again

Json = str | Mapping[str, Any] | bool | Sequence[Mapping[str, Any]]


def canonical(name: str, value: Any) -> Any:
    """A schema or tools as JSON text in one form, the order of keys kept; other text unchanged."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return value
    return _read(name, text)[0]


def json_problems(name: str, text: Any) -> Sequence[str]:
    """All problems of a schema or tools, which must be canonical. Their type has a Rule (SCHEMA, TOOLS)."""
    return _read(name, text)[1] if isinstance(text, str) else ()


@lru_cache(CACHED)
def _read(name: str, text: str) -> tuple[str, Sequence[str]]:
    """The canonical form of JSON text, and its problems."""
    if len(text) > MAX_BYTES:
        return text, [f"{name} has more than {MAX_BYTES} characters; give a smaller one"]
    kinds, form = JSON_FORMS[name]
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return text, [f"{name} must be {form}: {str(error)[:200]}"]
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if not isinstance(value, kinds):
        return text, [f"{name} must be {form}, not {reprlib.repr(value)}"]
    problems = [f"{name}{problem}" for problem in _size_problems(value)]
    return text, problems or (_tool_problems(value) if name == "tools" else [])


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _size_problems(value: Any) -> list[str]:
    """Parts of a schema that would take a grammar minutes or gigabytes."""
    problems: dict[str, None] = {}
    characters = properties = most = 0
    rest = [(value, 0)]
    while rest:
        part, depth = rest.pop()
        if depth > MAX_DEPTH:
            return [f" is nested more than {MAX_DEPTH} deep; make it flatter, or use $ref"]
        if isinstance(part, list):
            rest += [(item, depth + 1) for item in part]
        elif isinstance(part, dict):
            rest += [(item, depth + 1) for item in part.values()]
            problems |= dict.fromkeys(_pattern_problems(part))
            names = part.get("properties")
            number = len(names) if isinstance(names, dict) else 0
            properties, most = properties + number, max(most, number)
            characters += sum(len(json.dumps(part[key])) for key in ("const", "enum") if key in part)
    large = {
        f": const and enum have more than {MAX_CONSTANTS} characters; give fewer or shorter values": (
            characters > MAX_CONSTANTS
        ),
        f": its objects have more than {MAX_PROPERTIES} properties; give fewer": (
            properties > MAX_PROPERTIES
        ),
        f": an object has {most} properties, the limit is {MAX_PER_OBJECT}; give fewer": (
            most > MAX_PER_OBJECT
        ),
    }
    return [*problems, *(problem for problem, is_wrong in large.items() if is_wrong)]


def _pattern_problems(schema: Mapping[str, Any]) -> list[str]:
    """Problems of the patterns and of multipleOf of one object of a schema."""
    names = schema.get("patternProperties")
    patterns = [schema.get("pattern"), *(names if isinstance(names, dict) else ())]
    texts = [pattern for pattern in patterns if isinstance(pattern, str)]
    problems = []
    if any(len(text) > MAX_REGEX for text in texts):
        problems.append(f": a pattern has more than {MAX_REGEX} characters; give a shorter one")
    if any(len(text) <= MAX_REGEX and _expanded_length(text) > MAX_EXPANDED for text in texts):
        problems.append(
            f": a pattern repeats too much: written out it has more than {MAX_EXPANDED} characters"
        )
    multiple = schema.get("multipleOf")
    if isinstance(multiple, int | float) and abs(multiple) > MAX_MULTIPLE:
        problems.append(f": multipleOf is more than {MAX_MULTIPLE}; leave it out and check the answer")
    return problems


def _tool_problems(tools: Any) -> list[str]:
    if not 1 <= len(tools) <= MAX_TOOLS:
        return [f"tools must be a list of 1 to {MAX_TOOLS} functions, not of {len(tools)}"]
    names: list[str] = []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            return [
                f'tools[{i}] must be {{"type": "function", "function": {{...}}}}, not {reprlib.repr(tool)}'
            ]
        if not isinstance(function.get("name"), str) or not function["name"]:
            return [f"tools[{i}].function needs a name"]
        if not isinstance(function.get("parameters", {}), dict):
            return [f"tools[{i}].function.parameters must be a JSON schema, an object"]
        names.append(function["name"])
    repeated = sorted({name for name in names if names.count(name) > 1})
    return [f"tools have the same name twice: {', '.join(repeated)[:200]}"] if repeated else []


def _expanded_length(regex: str) -> int:
    """About how many characters a regex has with {n} and {n,m} written out: its cost to compile."""
    sums, last = [0], 0
    for part in PARTS.findall(regex):
        if part == "(":
            sums.append(0)
            last = 0
        elif part == ")" and len(sums) > 1:
            last = sums.pop()
            sums[-1] += last
        elif (counts := COUNTS.fullmatch(part)) is not None:
            more = last * (max(int(count) for count in counts.groups(default="1")) - 1)
            last += max(more, 0)
            sums[-1] += max(more, 0)
        else:
            last = 1
            sums[-1] += 1
    return sum(sums)


def _is_separators(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and all(isinstance(s, str) and len(s) <= 16 for s in value)
        and [s.strip(" \t\r\n") for s in value] == [",", ":"]
    )


def _is_choice(value: Any) -> bool:
    is_list = isinstance(value, tuple) and 0 < len(value) <= MAX_CHOICES
    return is_list and all(isinstance(c, str) and c for c in value) and sum(map(len, value)) <= MAX_CHARACTERS


REGEX = Rule(
    f"a text of 1 to {MAX_REGEX} characters, at most {MAX_EXPANDED} with its repetitions written out",
    lambda value: (
        isinstance(value, str) and 0 < len(value) <= MAX_REGEX and _expanded_length(value) <= MAX_EXPANDED
    ),
)
CHOICE = Rule(
    f"a list of 1 to {MAX_CHOICES} non-empty strings, at most {MAX_CHARACTERS} characters in all", _is_choice
)
SEPARATORS = Rule('a comma and a colon, with white space around them, such as (", ", ": ")', _is_separators)
SCHEMA, TOOLS = (
    Rule(words, lambda value: isinstance(value, str), "FILE") for _, words in JSON_FORMS.values()
)
GRAMMAR = Rule("the name of a grammar of the bundle", lambda value: isinstance(value, str) and value != "")
