"""Structured answers of a model that always wants something else, and what hostile grammars are told."""

from __future__ import annotations

import json
import random
import re
import socket
import string
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from attack.grammars import trial as grammar_trial
from attack.grammars import wrong
from attack.schemas import drawn_schema, trial
from support import tiny
from support.agreement import MAIN
from support.fixtures import Named, Sessions

from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import ExportOptions, export_onnx
from mars_export.runtime import Batcher, Commit, GenerationConfig, Session, SessionError
from mars_export.runtime.decode.structure import MOST_BYTES, MOST_REGEX
from mars_export.runtime.grammar import Grammars, leaves_a_choice
from mars_export.runtime.text import Text

PROMPT = [5, 17, 99]
SETTINGS: dict[str, dict[str, Any]] = {"tau 1": {"tau": 1.0}, "tau 0.5": {"tau": 0.5}, "exact": {}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Rome", "Oslo"]},
                "days": {"type": "integer", "maximum": 9, "minimum": 0},
            },
            "required": ["city"],
        },
    },
}  # fmt: skip
STOP = {"type": "function", "function": {"name": "stop"}}


@pytest.fixture(scope="module")
def session(sessions: Sessions) -> Session:
    return sessions(MAIN)


@pytest.mark.parametrize("seed", range(20))
def test_every_answer_satisfies_its_schema(seed: int, session: Session) -> None:
    draw = random.Random(seed)
    schema = drawn_schema(draw)
    texts = {}
    for name, setting in SETTINGS.items():
        config = GenerationConfig(max_new_tokens=400, schema=schema, **setting)
        done = session.generate(
            [draw.randrange(250) for _ in range(3)] if name == "tau 0.5" else PROMPT, config
        )
        assert done.finish_reason == "eos", (schema, done.text)
        jsonschema.validate(json.loads(done.text), schema)
        assert done.stats.tokens == len(done.token_ids) == len(done.confidences)
        texts[name] = done.token_ids
    assert texts["exact"] == texts["tau 1"]
    drawn = session.generate(
        PROMPT, GenerationConfig(max_new_tokens=400, schema=schema, temperature=3.0, seed=seed)
    )
    jsonschema.validate(json.loads(drawn.text), schema)  # fmt: skip


def test_rows_of_any_settings_satisfy_random_schemas(session: Session) -> None:
    """A short form of benchmarks/attack/schemas.py."""
    lines = [trial(session, seed, number=10) for seed in range(1000, 1020)]
    assert [line["wrong"] for line in lines] == [[]] * 20
    assert sum(line["answers"] for line in lines) == 200


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


def test_block_commit_says_that_it_takes_no_grammar(session: Session) -> None:
    with pytest.raises(SessionError, match="cursor commit"):
        session.generate(PROMPT, GenerationConfig(tau=0.9, choice=("a",)), commit=Commit("block"))


def test_a_grammar_is_compiled_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[GenerationConfig] = []
    original = Grammars._compile
    monkeypatch.setattr(
        Grammars, "_compile", lambda self, config: compiled.append(config) or original(self, config)
    )
    for _ in range(3):
        session.generate(PROMPT, GenerationConfig(choice=("compiled", "once")))
    session.generate(PROMPT, GenerationConfig(choice=("compiled", "once", "more")))
    assert len(compiled) == 2


# --- bundles: what the graph gives ---


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, checkpoints: Named) -> Callable[[int, bool], Session]:
    """A session of a bundle with so many likeliest tokens, with logits or without."""
    root = tmp_path_factory.mktemp("bare")

    def opened(top_k: int, logits: bool) -> Session:
        path: Path = root / f"{top_k}-{logits}"
        if not path.exists():
            options = ExportOptions(block=6, top_k=top_k, logits=logits, metrics=True)
            export_onnx(open_checkpoint(str(checkpoints(MAIN))), path, options)
        return Session.open(path, threads=1)

    return opened


def test_top_k_gives_the_answers_that_logits_give(
    bare: Callable[[int, bool], Session], session: Session
) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "bc", 12]}, "minItems": 2, "maxItems": 5}
    for metric in ("probability", "margin", "entropy"):
        for setting in ({"exact": True}, {"tau": 1.0 if metric != "entropy" else 0.0, "metric": metric}):
            config = GenerationConfig(schema=schema, **setting)
            expected = session.generate(PROMPT, config)
            for top_k, logits in ((256, False), (7, True)):
                found = bare(top_k, logits).generate(PROMPT, config)
                assert found.token_ids == expected.token_ids
                assert found.confidences == pytest.approx(expected.confidences, abs=1e-4)  # fmt: skip


def test_top_k_is_what_the_logits_say(bare: Callable[[int, bool], Session]) -> None:
    backend = bare(7, True).backend
    cache = backend.new_cache(1)
    cache.reserve(16)
    ids = np.array([[5, 17, 99, 4]])
    found = backend.step(cache, 0, ids, np.array([0]), np.array([[0, 2, 3]]), True)
    assert found.logits is not None and found.topk_ids is not None and found.topk_logprobs is not None
    exact = found.logits - found.logits.max(-1, keepdims=True)
    logprobs = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    order = np.argsort(-found.logits, axis=-1, kind="stable")[..., :7]
    assert (found.topk_ids == order).all() and (found.topk_ids[..., 0] == found.token_ids).all()
    np.testing.assert_allclose(found.topk_logprobs, np.take_along_axis(logprobs, order, -1), atol=1e-5)
    assert not (found.topk_ids == tiny.MASK).any()


def test_without_either_output_the_request_is_refused_at_once(bare: Callable[[int, bool], Session]) -> None:
    session = bare(0, False)
    with pytest.raises(SessionError, match=r"--top-k 16 or --logits"):
        session.generate(PROMPT, GenerationConfig(choice=("yes", "no")))
    assert session.generate(PROMPT, GenerationConfig(choice=("one way only",))).text == "one way only"


def test_where_no_allowed_token_is_among_the_likeliest_the_row_says_so(
    bare: Callable[[int, bool], Session],
) -> None:
    with pytest.raises(SessionError, match=r"none of the tokens that its top-k holds.*--logits"):
        bare(1, False).generate(PROMPT, GenerationConfig(regex="[a-z]{40}"))


def test_without_llguidance_the_message_names_the_extra(
    bundles: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session.open(bundles(MAIN), threads=1)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SessionError, match=r"mars-export\[grammar\]"):
        session.generate(PROMPT, GenerationConfig(choice=("a", "b")))


# --- hostile input ---

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "two at once": ({"regex": "a", "choice": ("b",)}, "exclude each other"),
    "no JSON": ({"schema": "{"}, "must be a JSON schema"),
    "a number": ({"schema": "5"}, "must be a JSON schema"),
    "not JSON at all": ({"schema": {"a": {1, 2}}}, "must be a JSON schema"),
    "an endless number": ({"schema": {"const": float("nan")}}, "must be a JSON schema"),
    "a large schema": ({"schema": {"description": "x" * MOST_BYTES}}, "more than 1000000 bytes"),
    "a deep schema": ({"schema": '{"items":' * 500 + "{}" + "}" * 500}, "nested more than 64"),
    "a very deep schema": ({"schema": "[" * 400_000}, "must be a JSON schema"),
    "an empty choice": ({"choice": ()}, "one or more non-empty strings"),
    "a choice of nothing": ({"choice": ("a", "")}, "one or more non-empty strings"),
    "a choice that is a text": ({"choice": "yes"}, "one or more non-empty strings"),
    "too many choices": ({"choice": tuple(map(str, range(10_001)))}, "more than 10000 strings"),
    "an empty regex": ({"regex": ""}, "regex must be a text"),
    "a megabyte of regex": ({"regex": "a?" * 500_000}, f"1 to {MOST_REGEX}"),
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


# --- the tokenizer ---


def grammars(text: Text, dialect: Any = "list") -> Grammars:
    return Grammars(text.tokenizer.to_str(), tiny.VOCAB_SIZE, (tiny.IM_END,), dialect)


@pytest.mark.parametrize("text", ["plain", "é😀", "a\tb", string.punctuation, "<|mask|>", " two  spaces "])
def test_forced_text_is_what_the_tokenizer_writes(text: str, session: Session) -> None:
    assert session.text is not None
    matcher = grammars(session.text).matcher(GenerationConfig(choice=(text,)))
    forced = matcher.forced()
    assert not leaves_a_choice(matcher)
    if "<|" not in text:
        assert forced == session.text.tokenizer.encode(text, add_special_tokens=False).ids
    while forced := matcher.forced():
        for token in forced:
            assert token != tiny.MASK
            matcher.consume(token)
    assert matcher.is_over and matcher.may_end and not matcher.mask().any()


def test_a_matcher_refuses_what_may_not_follow(session: Session) -> None:
    assert session.text is not None
    matcher = grammars(session.text).matcher(GenerationConfig(choice=("ab", "cd")))
    copy = matcher.copy()
    with pytest.raises(SessionError, match="the grammar went wrong"):
        copy.consume(ord("x"))
    assert matcher.mask().sum() >= 2, "the original is as it was"


TAGGED = (
    ("It is late.", True),
    ('<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>', True),
    ('Wait. <tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>', True),
    ('<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', False),
    ('<tool_call>\n{"name": "dance", "arguments": {}}\n</tool_call>', False),
)


@pytest.mark.parametrize(("answer", "is_right"), TAGGED)
def test_tagged_calls_stand_between_text(answer: str, is_right: bool, session: Session) -> None:
    assert session.text is not None
    matcher = grammars(session.text, "tags").matcher(GenerationConfig(tools=[WEATHER, STOP]))
    refused = False
    for token in session.text.tokenizer.encode(answer, add_special_tokens=False).ids:
        forced = matcher.forced()
        if not (forced[0] == token if forced else matcher.mask()[token]):
            refused = True
            break
        matcher.consume(token)
    assert refused is not is_right
    assert refused or matcher.may_end


@pytest.mark.parametrize("seed", range(6))
def test_one_token_is_allowed_where_the_mask_says_so(seed: int, session: Session) -> None:
    assert session.text is not None
    draw = random.Random(seed)
    config = GenerationConfig(schema=drawn_schema(draw)) if seed else GenerationConfig(tools=[WEATHER, STOP])
    matcher = grammars(session.text, "tags" if seed % 2 else "list").matcher(config)
    for _ in range(20):
        if forced := matcher.forced():
            matcher.consume(forced[0])
            continue
        if matcher.is_over:
            break
        asked = matcher.copy()
        asked.forced()
        one_by_one = [asked.allows(token) for token in range(tiny.VOCAB_SIZE)]
        mask = matcher.mask()
        assert one_by_one == mask.tolist() == [matcher.allows(token) for token in range(tiny.VOCAB_SIZE)]
        if not mask.any():
            break
        matcher.consume(draw.choice(np.flatnonzero(mask).tolist()))
    assert not any(matcher.allows(token) for token in (-1, tiny.VOCAB_SIZE, tiny.IM_END))


# --- the attack on grammars ---


@pytest.mark.parametrize(
    "name",
    [
        "a constant of 900 kB",
        "2**30 objects by reference",
        "40**40 cases",
        "an enum of 10,000",
        "anything at all",
    ],
)
def test_the_attack_is_bounded_in_time_and_memory(name: str) -> None:
    """All of them: benchmarks/attack/grammars.py."""
    assert wrong(line := grammar_trial(name)) == [], line


def test_the_attack_sees_what_is_wrong() -> None:
    assert wrong({"outcome": "compiled", "seconds": 1.0, "bytes": 1}) == []
    for bad in ({"outcome": "hang"}, {"outcome": "MemoryError"}, {"outcome": "compiled", "bytes": 1 << 30}):
        assert len(wrong(bad)) == 1
    assert wrong({"outcome": "SessionError", "seconds": 9.0, "step": 9.0, "length": 9000}) == [
        "seconds 9.0",
        "step 9.0",
        "length 9000",
    ]
