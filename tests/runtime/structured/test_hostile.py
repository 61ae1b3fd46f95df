"""What hostile grammars are told: refused where they are written, or an answer or an error soon."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from support.questions import PROMPT, STOP

from mars_export import GenerationConfig, Session, SessionError
from mars_export.runtime.answer_format import MAX_BYTES, MAX_REGEX

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "two at once": ({"regex": "a", "choice": ("b",)}, "exclude each other"),
    "no JSON": ({"schema": "{"}, "must be a JSON schema"),
    "a number": ({"schema": "5"}, "must be a JSON schema"),
    "not JSON at all": ({"schema": {"a": {1, 2}}}, "must be a JSON schema"),
    "an endless number": ({"schema": {"const": float("nan")}}, "must be a JSON schema"),
    "a large schema": ({"schema": {"description": "x" * MAX_BYTES}}, "more than 1000000 characters"),
    "a deep schema": ({"schema": '{"items":' * 500 + "{}" + "}" * 500}, "nested more than 64"),
    "a very deep schema": ({"schema": "[" * 400_000}, "must be a JSON schema"),
    "an empty choice": ({"choice": ()}, "a list of 1 to 10000 non-empty strings"),
    "a choice of nothing": ({"choice": ("a", "")}, "a list of 1 to 10000 non-empty strings"),
    "a choice that is a text": ({"choice": "yes"}, "a list of 1 to 10000 non-empty strings"),
    "too many choices": (
        {"choice": tuple(map(str, range(10_001)))},
        "a list of 1 to 10000 non-empty strings",
    ),
    "an empty regex": ({"regex": ""}, "regex must be a text"),
    "a megabyte of regex": ({"regex": "a?" * 500_000}, f"1 to {MAX_REGEX}"),
    "a long pattern": ({"schema": {"type": "string", "pattern": "a?" * 3000}}, "a pattern has more"),
    "a large divisor": ({"schema": {"multipleOf": 1_000_003}}, "multipleOf is more"),
    "no tools": ({"tools": []}, "1 to 1000 functions"),
    "tools that are none": ({"tools": [{"name": "x"}]}, r"tools\[0\] must be"),
    "a tool without a name": ({"tools": [{"type": "function", "function": {}}]}, "needs a name"),
    "tools of one name": ({"tools": [STOP, STOP]}, "same name twice: stop"),
    "separators": ({"separators": (";", ":")}, "separators must be"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_asked_is_refused_where_it_is_written(name: str) -> None:
    values, message = BAD[name]
    begun = time.process_time()
    with pytest.raises(SessionError, match=message) as refused:
        GenerationConfig(**values)
    assert len(str(refused.value)) < 1000 and time.process_time() - begun < 10


def doubling(levels: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {
        f"l{i}": {"type": "object", "required": ["a", "b"],
                  "properties": {k: {"$ref": f"#/$defs/l{i + 1}"} for k in "ab"}} for i in range(levels)
    }  # fmt: skip
    return {"$ref": "#/$defs/l0", "$defs": definitions | {f"l{levels}": {"type": "null"}}}


EXPLODING = {"allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {}}} for j in range(4)]} for i in range(10)]}
ITSELF = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
LINK = {
    "type": "object",
    "required": ["a"],
    "properties": {"a": {"$ref": "#/$defs/a"}},
    "additionalProperties": False,
}
ENDLESS = {"$ref": "#/$defs/a", "$defs": {"a": LINK}}
HOSTILE: dict[str, dict[str, Any]] = {
    "a schema that explodes": {"schema": EXPLODING},
    "a reference to itself": {"schema": ITSELF},
    "an answer without end": {"schema": ENDLESS},
    "two to the thirty": {"schema": doubling(30)},
    "somewhere else": {"schema": {"$ref": "http://localhost/schema.json"}},
    "nowhere": {"schema": {"$ref": "#/$defs/nowhere"}},
    "nothing": {"schema": False},
    "no value": {"schema": {"enum": []}},
    "a contradiction": {"schema": {"type": "string", "minLength": 5, "maxLength": 3}},
    "an unknown word": {"schema": {"not": {"type": "string"}}},
    "a million items": {"schema": {"type": "array", "items": {"const": 1}, "minItems": 1_000_000}},
    "a million characters": {"schema": {"type": "string", "minLength": 1_000_000}},
    "many properties": {
        "schema": {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(2000)}}
    },
    "a regex that is none": {"regex": "(("},
    "looking around": {"regex": "(?=a)b"},
    "powers": {"regex": "(a{1000}){1000}"},
    "towers": {"regex": "((((((((a{9}){9}){9}){9}){9}){9}){9}){9})"},
    "what matches nothing": {"regex": "[^\\x00-\\x{10FFFF}]"},
    "many questions": {"regex": "a?" * 900 + "a" * 100},
    "long choices": {"choice": tuple("x" * 9000 + str(i) for i in range(11))},
    "backtracking": {"regex": "(x+x+)+y"},
    "a long constant": {"schema": {"const": "a b" * 300_000}},
    "many words": {"schema": {"enum": [f"value {i * 7919 % 10_007}" for i in range(10_000)]}},
    "anything": {"schema": True},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_ends_in_an_answer_or_an_error_soon(name: str, session: Session) -> None:
    outcome: list[Any] = []

    def attempt() -> None:
        try:
            config = GenerationConfig(max_new_tokens=8, tau=1.0, **HOSTILE[name])
            outcome.append(session.generate(PROMPT, config).finish_reason)
        except SessionError as error:
            outcome.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(90)
    assert outcome, "it hangs"
    assert outcome[0] in ("eos", "length") or len(str(outcome[0])) < 600


def test_what_lies_elsewhere_is_never_fetched(session: Session) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.3)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
        for schema in ({"$ref": address}, {"$id": address, "$ref": "other.json"}, {"$schema": address}):
            with suppress(SessionError):
                session.generate(PROMPT, GenerationConfig(schema=schema, max_new_tokens=4))
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_hostile_grammar_leaves_the_session_as_it_was(session: Session) -> None:
    with pytest.raises(SessionError, match="simpler"):
        session.generate(PROMPT, GenerationConfig(regex="(("))
    assert session.generate(PROMPT, GenerationConfig(choice=("still here",))).text == "still here"
