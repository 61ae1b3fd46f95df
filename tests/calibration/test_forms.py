"""Rows that ask for a form of their answers: read, calibrated and measured with what grammars force."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.calibrations import task
from support.fixtures import Sessions
from support.missing import need
from support.tiny import Named
from typer.testing import CliRunner

from mars_export import CalibrationError, Session
from mars_export.calibration.bench import BenchRequest, bench
from mars_export.calibration.options import BenchOptions
from mars_export.calibration.tasks.tasks import DATA, TaskRow, find, load, read_form
from mars_export.calibration.tau.options import CalibrationOptions
from mars_export.calibration.tau.run import CalibrationRequest, run
from mars_export.cli import app

need("llguidance", "grammar")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["set_light", "set_alarm"]},
        "room": {"enum": ["kitchen", "garage", "hall"]},
        "level": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "room"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object"}}}
FORMS: list[dict[str, Any]] = [
    {"schema": SCHEMA},
    {"regex": "[a-c]{2}-[0-9]{3}"},
    {"choice": ["yes", "no", "not at all"]},
    {"tools": [TOOL]},
    {"choice": ["only this"]},
    {},
]


@pytest.fixture(scope="module")
def session(sessions: Sessions) -> Session:
    return sessions("qwen2")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Two rows of every form."""
    lines = [
        {"messages": [{"role": "user", "content": f"{word} {i}"}], "max_new_tokens": 60, **form}
        for i, form in enumerate(FORMS)
        for word in ("hello", "the cat")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "rows.jsonl"


@pytest.fixture
def tasks(rows: Path) -> list[TaskRow]:
    return load(rows)


def test_a_row_says_what_its_answer_looks_like(tasks: list[TaskRow]) -> None:
    asked = [task.form for task in tasks[::2]]
    assert json.loads(asked[0]["schema"]) == SCHEMA and json.loads(asked[3]["tools"]) == [TOOL]
    assert asked[1:3] == [{"regex": "[a-c]{2}-[0-9]{3}"}, {"choice": ("yes", "no", "not at all")}]
    assert asked[5] == {} and not tasks[-1].form
    digests = {replace(task, source=tasks[0].source).digest for task in tasks}
    assert len(digests) == len(FORMS), "the form is a part of what a row is"


def test_a_row_without_a_form_keeps_its_digest() -> None:
    """State files of before name rows by it."""
    row = task("hi", limit=8)
    assert row.digest.startswith("ef1c5b1beafd"), row.digest


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schema": SCHEMA, "regex": "a"}, "schema and regex exclude each other"),
        ({"schema": 3}, "schema must be a JSON schema"),
        ({"tools": {}}, "tools must be a list"),
        ({"schemas": {}}, "unknown field 'schemas'.*schema, regex, choice, tools"),
    ],
)
def test_a_bad_form_is_named_with_its_line(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(json.dumps({"prompt": "a", **fields}) + "\n")
    with pytest.raises(CalibrationError, match=f"line 1: .*{words}"):
        load(tmp_path / "bad.jsonl")


def test_a_calibration_of_structured_rows(bundles: Named, rows: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(bundles("qwen2"), tmp_path / "mine.bundle")
    options = CalibrationOptions(max_drop=0.9, taus=(0.9, 0.0), batch=4)
    request = CalibrationRequest(bundle, str(rows), output=tmp_path / "out", threads=1, options=options)
    report = run(request)
    calibration = report.calibration
    assert calibration.exact.same == calibration.exact.num_rows
    assert any("tokens came from the rows' grammars" in note for note in calibration.notes)
    again = run(replace(request, resume=True))
    known = ("same", "num_rows", "quality", "drop", "drop_bound")
    assert all(getattr(again.calibration.exact, n) == getattr(calibration.exact, n) for n in known)


def test_a_benchmark_of_structured_rows(bundles: Named, rows: Path) -> None:
    options = BenchOptions(taus=(0.5,), rounds=1, limit=12)
    report = bench(BenchRequest(bundles("qwen2"), str(rows), threads=1, options=options))
    compared = {line.setting.mode: line for line in report.compared}
    assert compared["tau 1"].forced > 0.2
    assert compared["exact"].forced == compared["tau 1"].forced
    assert compared["exact"].same_answers == 1
    assert any("grammars gave up to" in note for note in report.notes)


def test_a_grammar_that_cannot_be_is_named_with_its_row(session: Session, tmp_path: Path) -> None:
    from mars_export.calibration.rows import make_plan

    impossible = {"type": "string", "minLength": 3, "maxLength": 1}
    (tmp_path / "bad.jsonl").write_text(json.dumps({"prompt": "a", "schema": impossible}) + "\n")
    with pytest.raises(CalibrationError, match="rows that cannot be decoded:\n  row 1: the grammar cannot"):
        make_plan(session, load(tmp_path / "bad.jsonl"))


def test_a_schema_for_all_rows(rows: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps({"enum": [1, 2]}))
    request = CalibrationRequest(tmp_path, str(rows), schema=str(tmp_path / "schema.json"))
    forms = [task.form for task in request.rows()]
    assert [form["schema"] for form in forms[-2:]] == ['{"enum":[1,2]}'] * 2
    assert forms[:-2] == [task.form for task in load(rows)[:-2]], "a row's own form stays"
    for text, words in (("{", "not a JSON schema"), ("3", "must be a JSON schema")):
        (tmp_path / "schema.json").write_text(text)
        with pytest.raises(CalibrationError, match=f"schema.json: .*{words}"):
            request.rows()
    with pytest.raises(CalibrationError, match=r"none.json: cannot be read.*give a JSON schema"):
        replace(request, schema=str(tmp_path / "none.json")).rows()


def test_the_built_in_schema_takes_every_answer_of_the_assistant(tmp_path: Path) -> None:
    schema = json.loads((DATA / "assistant.schema.json").read_text(encoding="utf-8"))
    assert len(schema["items"]["anyOf"]) == 25
    tasks = CalibrationRequest(tmp_path, "assistant", schema="assistant").rows()
    assert all(task.form == read_form({"schema": schema}) for task in tasks)
    answers = jsonschema.Draft202012Validator(schema)
    for row in load(find("assistant")):
        answers.validate(json.loads(str(row.answer)))


@pytest.mark.parametrize("command", ["calibrate", "bench"])
def test_the_commands_take_a_schema(command: str, bundles: Named, rows: Path, tmp_path: Path) -> None:
    arguments = [command, str(bundles("qwen2")), "-t", str(rows), "--schema", str(tmp_path / "none.json")]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, CalibrationError) and "none.json: cannot be read" in str(done.exception)
