"""Grammars that are kept in a bundle: the masks, forced and likely tokens of llguidance for the same request;
tests/conformance/grammar.json; sessions, batches and commands that use one.
"""

from __future__ import annotations

import json
import shutil
from base64 import b64decode
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from support.agreement import MAIN
from support.fixtures import Named
from support.loops import outcomes
from support.missing import need
from support.paths import ROOT
from support.scripted import Scripted
from support.shell import run
from tokenizers import Tokenizer

from mars_export import Batcher, BundleError, GenerationConfig, Session, SessionError
from mars_export.runtime.bundle.manifest import StoredGrammar
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.decode.limits import Limits
from mars_export.runtime.decode.schedule import Schedule
from mars_export.runtime.structured.constrained_sequence import ConstrainedSequence
from mars_export.runtime.structured.grammar import SEPARATORS, Grammars
from mars_export.runtime.structured.grammar_state import GrammarState
from mars_export.runtime.structured.matcher import TokenMatcher
from mars_export.runtime.structured.stored_grammars import (
    compile_grammar,
    compile_into,
    entries,
    remove,
    store,
    to_bytes,
)
from mars_export.runtime.structured.vocabulary import Vocabulary
from mars_export.runtime.text.dialects import LIST, TAGS

GIVEN = json.loads((ROOT / "tests/conformance/grammar.json").read_text())
PROMPT = [5, 17, 99]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "\u00e9t\u00e9"]}, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["ok"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Oslo"]}, "note": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "weather_now")
]


DIALECTS = {"list": LIST, "tags": TAGS}


@pytest.fixture
def bundle(bundles: Named, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundles(MAIN), tmp_path / "b"))


@pytest.fixture(scope="module")
def given_vocabulary() -> Vocabulary:
    need("llguidance", "grammar")
    return Vocabulary(Tokenizer.from_str(GIVEN["tokenizer"]), GIVEN["vocab_size"], [GIVEN["end"]])


def matcher_of(file: dict[str, Any], vocabulary: Vocabulary) -> TokenMatcher:
    """llguidance's for the request of a grammar, which libmars reads from its file."""
    return Grammars(vocabulary, DIALECTS[file["dialect"]]).matcher(config_of(file))


def config_of(file: dict[str, Any]) -> GenerationConfig:
    request = {key: tuple(value) if key == "choice" else value for key, value in file["request"].items()}
    return GenerationConfig(**request)


@pytest.mark.parametrize("file", GIVEN["files"], ids=lambda file: file["name"])
def test_every_state_of_the_conformance_file(file: dict[str, Any], given_vocabulary: Vocabulary) -> None:
    automaton = compile_grammar(config_of(file), DIALECTS[file["dialect"]], SEPARATORS)
    assert to_bytes(automaton) == b64decode(file["file"])
    for state in file["states"]:
        matcher = matcher_of(file, given_vocabulary)
        for token in state["tokens"]:
            matcher.consume(token)
        assert list(matcher.forced()) == state["forced"]
        assert matcher.may_end == state["may_end"]
        if "mask" in state:
            assert np.packbits(matcher.mask(), bitorder="little").tobytes().hex() == state["mask"]
            likely = matcher.likely()
            assert (None if likely is None else list(likely)) == state["likely"]


@pytest.mark.parametrize("case", GIVEN["answers"], ids=lambda case: case["name"])
def test_every_answer_of_the_conformance_file(case: dict[str, Any], given_vocabulary: Vocabulary) -> None:
    model = Scripted(
        case["script"], len(GIVEN["prompt"]), GIVEN["vocab_size"], case["seed"], case["top_k"],
        case["logits"], case["max_slots"],
    )  # fmt: skip
    matcher = matcher_of(GIVEN["files"][case["grammar"]], given_vocabulary)
    grammar_state = GrammarState(matcher, [GIVEN["end"]], case["logits"], case["block"] - 1)
    names = ("tau", "max_new_tokens", "masks", "prompt_lookup")
    config = GenerationConfig(**{name: case[name] for name in names})
    row = ConstrainedSequence(0, GIVEN["prompt"], config, [GIVEN["end"]], grammar_state=grammar_state)
    schedule = Schedule(model, case["block"], GIVEN["mask"], Limits.of_rows(1))
    schedule.add(row)
    events = []
    while not schedule.is_idle:
        events += outcomes(schedule)
    expected = case["expected"]
    assert [str(e.error) for e in events if e.error] == ([expected["error"]] if expected["error"] else [])
    assert [list(event.token_ids) for event in events if event.error is None] == expected["runs"]
    counts = {
        name: getattr(row.stats, name)
        for name in ("forced", "draft_tokens", "accepted_draft_tokens", "forwards")
    }
    assert counts == {name: expected[name] for name in counts}
    assert row.finish_reason == expected["finish_reason"]


def test_a_session_follows_a_grammar_of_its_bundle(bundle: Path) -> None:
    compile_into(bundle, "person", GenerationConfig(schema=PERSON))
    compile_into(bundle, "code", GenerationConfig(regex="[A-Z]{2}[0-9]{4}"))
    session = Session.open(bundle)
    texts, settings = [], list[dict[str, Any]]([{}, {"tau": 1.0}, {"tau": 0.5}])
    for setting in settings:
        done = session.generate(PROMPT, GenerationConfig(grammar="person", max_new_tokens=200, **setting))
        assert done.finish_reason == "eos" and done.stats.forced > 0
        jsonschema.validate(json.loads(done.text), PERSON)
        texts.append(done.text)
    assert texts[0] == texts[1]
    same = session.generate(PROMPT, GenerationConfig(schema=PERSON, max_new_tokens=200))
    assert same.text == texts[0]
    configs = [GenerationConfig(grammar=name, max_new_tokens=90) for name in ("code", "person")]
    alone = [session.generate(PROMPT, config).token_ids for config in configs]
    assert [each.token_ids for each in session.generate_batch([PROMPT] * 2, configs)] == alone
    with Batcher(session) as batcher:
        assert batcher.submit(PROMPT, configs[0]).result().token_ids == alone[0]
    with pytest.raises(SessionError, match=r"no grammar `cod` \(there are: code, person\)"):
        session.generate(PROMPT, GenerationConfig(grammar="cod"))
    config = GenerationConfig(grammar="code", tau=0.9, masks=0)
    made = session.generate(PROMPT, config, cache_block=8)
    assert made.token_ids == session.generate(PROMPT, config).token_ids
    with pytest.raises(SessionError, match="regex and grammar exclude each other"):
        GenerationConfig(grammar="code", regex="a")
    with pytest.raises(SessionError, match="grammar must be the name"):
        GenerationConfig(grammar="")


def test_grammars_are_stored_replaced_and_removed(bundle: Path) -> None:
    before = {file.name for file in bundle.iterdir()}
    first = compile_into(bundle, "g", GenerationConfig(choice=("a", "b")))
    other = compile_into(bundle, "same", GenerationConfig(choice=("b", "a")))
    assert first.file == other.file, "one language has one file"
    again = compile_into(bundle, "g", GenerationConfig(choice=("a", "c")))
    assert again.file != first.file
    assert [row["name"] for row in entries(bundle)] == ["same", "g"]
    assert {file.name for file in bundle.iterdir()} - before == {first.file, again.file}
    remove(bundle, "same")
    remove(bundle, "g")
    assert {file.name for file in bundle.iterdir()} == before
    with pytest.raises(SessionError, match=r"no grammar `g` \(there are: none\)"):
        remove(bundle, "g")
    for name in ("../x", "", "a b", "x" * 65):
        with pytest.raises(BundleError, match="a name of at most 64 letters"):
            compile_into(bundle, name, GenerationConfig(choice=("a",)))


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [("name", "../x", "letters, digits"), ("file", "model.onnx", "grammar-, 16"), ("kind", "song", "kind")],
)
def test_manifests_with_odd_grammars_are_refused(bundle: Path, field: str, value: str, word: str) -> None:
    from mars_export.runtime.bundle.manifest import parse_manifest

    compile_into(bundle, "g", GenerationConfig(choice=("a", "b")))
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["grammars"][0][field] = value
    with pytest.raises(BundleError, match=word):
        parse_manifest(json.dumps(manifest))


@pytest.mark.parametrize(
    ("evidence", "word"),
    [
        ({}, "its schema is missing"),
        ({"schema": "person.json"}, "schema must be"),
        ({"schema": 5}, "schema must"),
    ],
)
def test_a_grammar_without_its_request(bundle: Path, evidence: dict[str, Any], word: str) -> None:
    store(bundle, StoredGrammar("g", "grammar-0123456789abcdef.dfa", "schema", 1, evidence), b"x")
    with pytest.raises(SessionError, match=rf"request for grammar `g` \({word}.*compile it again") as caught:
        Session.open(bundle).generate(PROMPT, GenerationConfig(grammar="g"))
    assert (caught.value.code, caught.value.field) == ("invalid_grammar", "grammar")


def test_a_grammar_is_stored_whole_or_not_at_all(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = (bundle / "manifest.json").read_bytes()
    monkeypatch.setattr("mars_export.runtime.bundle.open.write_whole", full)
    with pytest.raises(BundleError, match="No space left on device"):
        store(bundle, StoredGrammar("g", "grammar-0123456789abcdef.dfa", "regex", 1), b"x")
    assert (bundle / "manifest.json").read_bytes() == before
    open_bundle(bundle)


def test_the_commands(bundle: Path, tmp_path: Path) -> None:
    tools, schema = tmp_path / "tools.json", tmp_path / "schema.json"
    tools.write_text(json.dumps(TOOLS))
    schema.write_text(json.dumps(PERSON))
    assert "no grammars" in run("grammar", "list", bundle).stdout
    assert "tools: tools," in run("grammar", bundle, "--tools", tools, "--name", "tools").stdout
    made = json.loads(run("grammar", bundle, "--schema", schema, "--name", "p", "--json").stdout)
    assert made["kind"] == "schema"
    run("grammar", bundle, "--choice", "yes", "--choice", "no", "--name", "c")
    found = json.loads(run("grammar", "list", bundle, "--json").stdout)
    kinds = [(row["name"], row["kind"]) for row in found]
    assert kinds == [("tools", "tools"), ("p", "schema"), ("c", "choice")]
    assert json.loads(found[0]["evidence"]["tools"]) == TOOLS and "separators" in found[0]["evidence"]
    assert "choice" in run("grammar", "list", bundle).stdout
    done = json.loads(run("generate", bundle, "--prompt", "hi", "--grammar", "c", "--json").stdout)
    assert done["text"] in ("yes", "no")
    assert "removed the grammar c" in run("grammar", "remove", bundle, "c").stdout
    failed = run("generate", bundle, "--prompt", "hi", "--grammar", "c")
    assert "no grammar `c`" in failed.stderr
    schema.write_text(json.dumps({"oneOf": []}))
    assert "`oneOf`" in run("grammar", bundle, "--schema", schema, "--name", "x").stderr
    assert "no grammar to compile: give a schema" in run("grammar", bundle, "--name", "x").stderr
