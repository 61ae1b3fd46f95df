"""What a request may say of the form of its answer: values made canonical and checked. Knows no grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MOST_BYTES = 1_000_000  # of a schema, of tools
MOST_CHARACTERS = 100_000  # of all choices together
MOST_REGEX = 2048  # characters; a pattern of a schema, too
MOST_SPELLED = 20_000  # characters of a regex with its repetitions {n} written out
MOST_MULTIPLE = 100_000  # of multipleOf
MOST_CHOICES, MOST_TOOLS = 10_000, 1000
MOST_CONSTANTS = 200_000  # characters of all constants and enums of a schema
MOST_PROPERTIES, MOST_NAMED = 5000, 500  # of all objects of a schema, and of one: compiling is quadratic
MOST_DEPTH = 64  # objects and lists in one another

PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{[0-9]{0,9},?[0-9]{0,9}\}|.", re.DOTALL)
COUNTS = re.compile(r"\{([0-9]+)?,?([0-9]+)?\}")

JSON_FORMS: dict[str, tuple[tuple[type, ...], str]] = {
    "schema": ((dict, bool), "a JSON schema, an object or its text"),
    "tools": ((list,), "a list of functions in OpenAI's form, or its text"),
}

Json = str | Mapping[str, Any] | bool | Sequence[Mapping[str, Any]]


class JsonText(str):
    """JSON text in one form, looked through once: a copy of a config does not parse it again."""

    problems: tuple[str, ...] = ()


def canonical(name: str, value: Any) -> Any:
    """A schema or tools as a JsonText, the order of keys kept; what is no JSON stays as it is, for a
    complaint.
    """
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


def structure_problems(
    schema: Any, regex: Any, choice: Any, tools: Any, separators: Any, grammar: Any = None
) -> list[tuple[str, str]]:
    """Everything that is wrong with these fields of a GenerationConfig, each with the field that is to blame;
    schema and tools are canonical.
    """
    fields = {"schema": schema, "regex": regex, "choice": choice, "tools": tools, "grammar": grammar}
    given = [name for name, value in fields.items() if value is not None]
    problems = (
        [(given[0], f"{' and '.join(given)} exclude each other: give one of them")] if len(given) > 1 else []
    )
    for name in ("schema", "tools"):
        problems += [(name, problem) for problem in _json_problems(name, fields[name])]
    problems += [("regex", problem) for problem in _regex_problems(regex)]
    problems += [("choice", problem) for problem in _choice_problems(choice)]
    if grammar is not None and not (isinstance(grammar, str) and grammar):
        problems.append(
            ("grammar", f"grammar must be the name of a grammar of the bundle, not {_shown(grammar)}")
        )
    problems += [("separators", problem) for problem in _separator_problems(separators)]
    return problems


def _separator_problems(separators: Any) -> list[str]:
    if separators is None or (
        isinstance(separators, tuple)
        and len(separators) == 2
        and all(isinstance(s, str) for s in separators)
        and separators[0].strip(" \t\r\n") == ","
        and separators[1].strip(" \t\r\n") == ":"
        and max(map(len, separators)) <= 16
    ):
        return []
    return [
        'separators must be a comma and a colon, with white space around them, such as (", ", ": "), not'
        f" {_shown(separators)}"
    ]


def _regex_problems(regex: Any) -> list[str]:
    if regex is None:
        return []
    if not (isinstance(regex, str) and 0 < len(regex) <= MOST_REGEX):
        return [f"regex must be a text of 1 to {MOST_REGEX} characters, not {_shown(regex)}"]
    if _spelled(regex) > MOST_SPELLED:
        return [f"regex repeats too much: written out it has more than {MOST_SPELLED} characters"]
    return []


def _json_problems(name: str, text: Any) -> Sequence[str]:
    if text is None or isinstance(text, JsonText):
        return () if text is None else text.problems
    if isinstance(text, str) and len(text) > MOST_BYTES:
        return [f"{name} has more than {MOST_BYTES} bytes; give a smaller one"]
    reason = f", not {_shown(text)}"
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
        return [f"{name} must be {form}, not {_shown(value)}"]
    if _depth(value) > MOST_DEPTH:
        return [f"{name} is nested more than {MOST_DEPTH} deep; make it flatter, or use $ref"]
    problems = [*dict.fromkeys(_costly(value)), *_large(value)]
    return [f"{name}: {problem}" for problem in problems] or (
        _tool_problems(value) if name == "tools" else []
    )


def _costly(value: Any) -> Iterator[str]:
    """Parts that would take a grammar minutes or gigabytes."""
    if isinstance(value, list):
        for inner in value:
            yield from _costly(inner)
    elif isinstance(value, dict):
        patterns = [
            value.get("pattern"),
            *(keys if isinstance(keys := value.get("patternProperties"), dict) else ()),
        ]
        if any(isinstance(pattern, str) and len(pattern) > MOST_REGEX for pattern in patterns):
            yield f"a pattern has more than {MOST_REGEX} characters; give a shorter one"
        if any(isinstance(p, str) and len(p) <= MOST_REGEX and _spelled(p) > MOST_SPELLED for p in patterns):
            yield f"a pattern repeats too much: written out it has more than {MOST_SPELLED} characters"
        multiple = value.get("multipleOf")
        if isinstance(multiple, int | float) and abs(multiple) > MOST_MULTIPLE:
            yield f"multipleOf is more than {MOST_MULTIPLE}; leave it out and check the answer"
        for inner in value.values():
            yield from _costly(inner)


def _large(value: Any) -> Iterator[str]:
    """What takes seconds or hundreds of megabytes by its size alone."""
    characters = properties = most = 0
    rest = [value]
    while rest:
        part = rest.pop()
        if isinstance(part, list):
            rest += part
        elif isinstance(part, dict):
            rest += part.values()
            named = part.get("properties")
            number = len(named) if isinstance(named, dict) else 0
            properties, most = properties + number, max(most, number)
            constants = [part[key] for key in ("const", "enum") if key in part]
            characters += sum(len(json.dumps(constant)) for constant in constants)
    if characters > MOST_CONSTANTS:
        yield f"const and enum have more than {MOST_CONSTANTS} characters; give fewer or shorter values"
    if properties > MOST_PROPERTIES:
        yield f"its objects have more than {MOST_PROPERTIES} properties; give fewer"
    if most > MOST_NAMED:
        yield f"an object has {most} properties, at most {MOST_NAMED} are taken; give fewer"


def _tool_problems(tools: Any) -> list[str]:
    if not 1 <= len(tools) <= MOST_TOOLS:
        return [f"tools must be a list of 1 to {MOST_TOOLS} functions, not of {len(tools)}"]
    names: list[str] = []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            return [f'tools[{i}] must be {{"type": "function", "function": {{...}}}}, not {_shown(tool)}']
        if not isinstance(function.get("name"), str) or not function["name"]:
            return [f"tools[{i}].function needs a name"]
        if not isinstance(function.get("parameters", {}), dict):
            return [f"tools[{i}].function.parameters must be a JSON schema, an object"]
        names.append(function["name"])
    twice = sorted({name for name in names if names.count(name) > 1})
    return [f"tools have the same name twice: {', '.join(twice)[:200]}"] if twice else []


def _choice_problems(choice: Any) -> list[str]:
    if choice is None:
        return []
    if not (isinstance(choice, tuple) and choice and all(isinstance(c, str) and c for c in choice)):
        return [f"choice must be a list of one or more non-empty strings, not {_shown(choice)}"]
    if len(choice) > MOST_CHOICES or sum(map(len, choice)) > MOST_CHARACTERS:
        return [f"choice holds more than {MOST_CHOICES} strings or {MOST_CHARACTERS} characters; give fewer"]
    return []


def _spelled(regex: str) -> int:
    """About how many characters a regex has once {n} and {n,m} are written out: what it costs to compile."""
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


def _depth(value: Any) -> int:
    """How deep objects and lists lie in one another."""
    level, depth = [value], 0
    while level:
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        depth += bool(level)
    return depth


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 100 else f"{shown[:100]}..."
