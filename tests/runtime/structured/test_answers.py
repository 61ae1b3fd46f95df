"""Structured answers of a model that always wants something else."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
from support.agreement import MAIN
from support.fixtures import Named
from support.questions import PROMPT, STOP, WEATHER
from support.schemas import wrong_answers

from mars_export import Batcher, GenerationConfig, Session, SessionError
from mars_export.runtime.structured.grammar import Grammars

SETTINGS: dict[str, dict[str, Any]] = {"tau 1": {"tau": 1.0}, "tau 0.5": {"tau": 0.5}, "exact": {}}


def test_rows_of_any_settings_satisfy_random_schemas(session: Session) -> None:
    assert [wrong_answers(session, seed, number=10) for seed in range(1000, 1020)] == [[]] * 20


@pytest.mark.parametrize("name", SETTINGS)
def test_regex_and_choice(name: str, session: Session) -> None:
    found = session.generate(PROMPT, GenerationConfig(regex=r"(\+\d{1,3} )?\d{3}/\d{4}", **SETTINGS[name]))
    assert re.fullmatch(r"(\+\d{1,3} )?\d{3}/\d{4}", found.text)
    choices = ("yes", 'a/b\\ "c"', "no.*", "né\n", "yes, but")
    found = session.generate(PROMPT, GenerationConfig(choice=choices, **SETTINGS[name]))
    assert found.text in choices and found.finish_reason == "eos"
    found = session.generate(PROMPT, GenerationConfig(choice=("only this",), **SETTINGS[name]))
    assert (found.text, found.stats.forwards) == ("only this", 0)
    assert found.stats.forced == found.stats.tokens


@pytest.mark.parametrize("name", SETTINGS)
def test_tools_give_calls(name: str, session: Session) -> None:
    config = GenerationConfig(
        tools=[WEATHER, STOP], max_new_tokens=60, separators=(", ", ": "), **SETTINGS[name]
    )
    stream = session.stream([{"role": "user", "content": "hi"}], config)
    reader = session.tool_stream()
    for event in stream:
        reader.push(event.text)
    reader.finish()
    assert stream.completion.text.startswith('[{"name": "')
    for call in reader.answer.calls:
        assert call.name in ("weather", "stop")
        assert call.name == "stop" or json.loads(call.arguments)["city"] in ("Rome", "Oslo")


def test_separators_are_those_that_were_asked_for(session: Session) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": [1, 2]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    spaced = GenerationConfig(schema=schema, separators=(", ", ": "))
    assert session.generate(PROMPT, spaced).text == '{"a": 1, "b": [1, 2]}'
    compact = GenerationConfig(schema=schema, separators=(",", ":"))
    assert session.generate(PROMPT, compact).text == '{"a":1,"b":[1,2]}'


def test_rows_of_a_batch_follow_grammars_of_their_own(session: Session) -> None:
    asked = [{"choice": ("red", "blue")}, {}, {"regex": "[0-9]{4}"}, {"schema": {"type": "boolean"}}]
    configs = [GenerationConfig(max_new_tokens=12, eos_ids=None, **part) for part in asked]
    alone = [session.generate(PROMPT, config).token_ids for config in configs]
    together = session.generate_batch([PROMPT] * 4, configs)
    assert [done.token_ids for done in together] == alone
    with Batcher(session) as batcher:
        requests = [batcher.submit(PROMPT, config) for config in configs]
        answers = [request.result(60) for request in requests]
    assert [done.token_ids for done in answers] == alone
    assert answers[0].text in ("red", "blue") and answers[3].text in ("true", "false")


def test_a_limit_and_a_stop_string_end_an_answer_early(session: Session) -> None:
    config = GenerationConfig(choice=("one two three",), max_new_tokens=4)
    done = session.generate(PROMPT, config)
    assert (done.finish_reason, len(done.token_ids)) == ("length", 4)
    done = session.generate(PROMPT, GenerationConfig(choice=("one two three",), stop=("two",)))
    assert (done.text, done.finish_reason) == ("one ", "stop")
    done = session.generate(PROMPT, GenerationConfig(choice=("one two three",), eos_ids=()))
    assert (done.text, done.finish_reason) == ("one two three", "stop")


def test_a_grammar_is_compiled_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    original = Grammars._compile
    monkeypatch.setattr(
        Grammars, "_compile", lambda self, form: compiled.append(form) or original(self, form)
    )
    session = Session(session.bundle, session.variant, session.backend, session.text)
    for _ in range(3):
        session.generate(PROMPT, GenerationConfig(choice=("compiled", "once")))
    session.generate(PROMPT, GenerationConfig(choice=("compiled", "once", "more")))
    assert len(compiled) == 2


def test_without_llguidance_the_message_names_the_extra(
    bundles: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session.open(bundles(MAIN), threads=1)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SessionError, match=r"mars-export\[grammar\]"):
        session.generate(PROMPT, GenerationConfig(choice=("a", "b")))
