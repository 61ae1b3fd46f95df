"""The format that a request asks of its answer: schema, regex, choice, tools, separators, grammar.

Values are checked here, and bounded where compiling them would take minutes or gigabytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

MOST_BYTES = 1_000_000  # of a schema, of tools
MOST_CHARACTERS = 100_000  # of all choices together
MOST_REGEX = 2048  # characters of a regex, and of a pattern in a schema
MOST_EXPANDED = 20_000  # characters of a regex with its repetitions {n} written out
MOST_MULTIPLE = 100_000  # of multipleOf
MOST_CHOICES, MOST_TOOLS = 10_000, 1000
MOST_CONSTANTS = 200_000  # characters of all constants and enums of a schema
MOST_PROPERTIES, MOST_PER_OBJECT = 5000, 500  # of a schema, and of one object: compiling is quadratic
MOST_DEPTH = 64  # objects and lists inside one another

PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{[0-9]{0,9},?[0-9]{0,9}\}|.", re.DOTALL)
COUNTS = re.compile(r"\{([0-9]+)?,?([0-9]+)?\}")

JSON_FORMS: dict[str, tuple[tuple[type, ...], str]] = {
    "schema": ((dict, bool), "a JSON schema, an object or its text"),
    "tools": ((list,), "a list of functions in OpenAI's form, or its text"),
}

Json = str | Mapping[str, Any] | bool | Sequence[Mapping[str, Any]]


class JsonText(str):
    """JSON text in canonical form, with its problems: a copy of a config does not check it again."""

    problems: tuple[str, ...] = ()


def canonical(name: str, value: Any) -> Any:
    """A schema or tools as JsonText, the order of keys kept. What is not JSON is returned unchanged."""
    if value is None or isinstance(value, JsonText):
        return value
    try:
        parsed = json.loads(value) if isinstance(value, str) and len(value) <= MOST_BYTES else value
        if isinstance(parsed, str):
            return value
        text = JsonText(json.dumps(parsed, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
    except (TypeError, ValueError, RecursionError):
        return value
    text.problems = tuple(_problems_of(name, text, json.loads(text)))
    return text


def format_problems(
    schema: Any, regex: Any, choice: Any, tools: Any, separators: Any, grammar: Any = None
) -> list[tuple[str, str]]:
    """All problems of these fields of a GenerationConfig, each with the name of its field.

    `schema` and `tools` must be canonical.
    """
    fields = {"schema": schema, "regex": regex, "choice": choice, "tools": tools, "grammar": grammar}
    names = [name for name, value in fields.items() if value is not None]
    problems = []
    if len(names) > 1:
        problems.append((names[0], f"{' and '.join(names)} exclude each other: give one of them"))
    checks = {
        "schema": _json_problems("schema", schema),
        "tools": _json_problems("tools", tools),
        "regex": _regex_problems(regex),
        "choice": _choice_problems(choice),
        "grammar": _grammar_problems(grammar),
        "separators": _separator_problems(separators),
    }
    return problems + [(name, text) for name, texts in checks.items() for text in texts]


def _grammar_problems(grammar: Any) -> list[str]:
    if grammar is None or (isinstance(grammar, str) and grammar):
        return []
    return [f"grammar must be the name of a grammar of the bundle, not {_short(grammar)}"]


def _separator_problems(separators: Any) -> list[str]:
    if separators is None or (
        isinstance(separators, tuple)
        and len(separators) == 2
        and all(isinstance(s, str) and len(s) <= 16 for s in separators)
        and [s.strip(" \t\r\n") for s in separators] == [",", ":"]
    ):
        return []
    return [
        'separators must be a comma and a colon, with white space around them, such as (", ", ": "), not'
        f" {_short(separators)}"
    ]


def _regex_problems(regex: Any) -> list[str]:
    if regex is None:
        return []
    if not (isinstance(regex, str) and 0 < len(regex) <= MOST_REGEX):
        return [f"regex must be a text of 1 to {MOST_REGEX} characters, not {_short(regex)}"]
    if _expanded_length(regex) > MOST_EXPANDED:
        return [f"regex repeats too much: written out it has more than {MOST_EXPANDED} characters"]
    return []


def _json_problems(name: str, text: Any) -> Sequence[str]:
    if text is None or isinstance(text, JsonText):
        return () if text is None else text.problems
    if isinstance(text, str) and len(text) > MOST_BYTES:
        return [f"{name} has more than {MOST_BYTES} bytes; give a smaller one"]
    reason = f", not {_short(text)}"
    if isinstance(text, str):
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            reason = f": {str(error)[:200]}"
    return [f"{name} must be {JSON_FORMS[name][1]}{reason}"]


def _problems_of(name: str, text: str, value: Any) -> list[str]:
    if len(text.encode("utf-8", "replace")) > MOST_BYTES:
        return [f"{name} has more than {MOST_BYTES} bytes; give a smaller one"]
    kinds, form = JSON_FORMS[name]
    if not isinstance(value, kinds):
        return [f"{name} must be {form}, not {_short(value)}"]
    problems = [f"{name}{problem}" for problem in _size_problems(value)]
    return problems or (_tool_problems(value) if name == "tools" else [])


def _size_problems(value: Any) -> list[str]:
    """Parts of a schema that would take a grammar minutes or gigabytes."""
    problems: dict[str, None] = {}
    characters = properties = most = 0
    rest = [(value, 0)]
    while rest:
        part, depth = rest.pop()
        if depth > MOST_DEPTH:
            return [f" is nested more than {MOST_DEPTH} deep; make it flatter, or use $ref"]
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
        f": const and enum have more than {MOST_CONSTANTS} characters; give fewer or shorter values": (
            characters > MOST_CONSTANTS
        ),
        f": its objects have more than {MOST_PROPERTIES} properties; give fewer": (
            properties > MOST_PROPERTIES
        ),
        f": an object has {most} properties, the limit is {MOST_PER_OBJECT}; give fewer": (
            most > MOST_PER_OBJECT
        ),
    }
    return [*problems, *(problem for problem, is_wrong in large.items() if is_wrong)]


def _pattern_problems(schema: Mapping[str, Any]) -> list[str]:
    """Problems of the patterns and of multipleOf of one object of a schema."""
    names = schema.get("patternProperties")
    patterns = [schema.get("pattern"), *(names if isinstance(names, dict) else ())]
    texts = [pattern for pattern in patterns if isinstance(pattern, str)]
    problems = []
    if any(len(text) > MOST_REGEX for text in texts):
        problems.append(f": a pattern has more than {MOST_REGEX} characters; give a shorter one")
    if any(len(text) <= MOST_REGEX and _expanded_length(text) > MOST_EXPANDED for text in texts):
        problems.append(
            f": a pattern repeats too much: written out it has more than {MOST_EXPANDED} characters"
        )
    multiple = schema.get("multipleOf")
    if isinstance(multiple, int | float) and abs(multiple) > MOST_MULTIPLE:
        problems.append(f": multipleOf is more than {MOST_MULTIPLE}; leave it out and check the answer")
    return problems


def _tool_problems(tools: Any) -> list[str]:
    if not 1 <= len(tools) <= MOST_TOOLS:
        return [f"tools must be a list of 1 to {MOST_TOOLS} functions, not of {len(tools)}"]
    names: list[str] = []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            return [f'tools[{i}] must be {{"type": "function", "function": {{...}}}}, not {_short(tool)}']
        if not isinstance(function.get("name"), str) or not function["name"]:
            return [f"tools[{i}].function needs a name"]
        if not isinstance(function.get("parameters", {}), dict):
            return [f"tools[{i}].function.parameters must be a JSON schema, an object"]
        names.append(function["name"])
    repeated = sorted({name for name in names if names.count(name) > 1})
    return [f"tools have the same name twice: {', '.join(repeated)[:200]}"] if repeated else []


def _choice_problems(choice: Any) -> list[str]:
    if choice is None:
        return []
    if not (isinstance(choice, tuple) and choice and all(isinstance(c, str) and c for c in choice)):
        return [f"choice must be a list of one or more non-empty strings, not {_short(choice)}"]
    if len(choice) > MOST_CHOICES or sum(map(len, choice)) > MOST_CHARACTERS:
        return [f"choice holds more than {MOST_CHOICES} strings or {MOST_CHARACTERS} characters; give fewer"]
    return []


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


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
