"""A run and its state: interrupted and resumed, beside that of another bundle."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.calibrations import OPTIONS, WORDS
from support.tiny import Named

from mars_export import CalibrationError
from mars_export.calibration.rows import make_plan
from mars_export.calibration.tau.run import CalibrationRequest, conditions, run


def test_a_second_bundle_has_its_own_folder_and_its_own_state(
    request_for: Callable[..., CalibrationRequest],
    bundles: Named,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    first = request_for(output=None, store=False)
    second = replace(first, bundle=shutil.copytree(bundles("llama"), tmp_path / "other.bundle"))
    for request in (first, second):
        run(request)
    assert (first.folder, second.folder) == (Path("calibration-words-mine"), Path("calibration-words-other"))
    assert all((request.folder / "report.md").exists() for request in (first, second))
    same = tmp_path / "same"
    for request in (first, second):
        run(replace(request, output=same))
    assert len(list(same.glob("state-*.jsonl"))) == 2
    with pytest.raises(CalibrationError, match="--resume continues it"):
        run(replace(first, output=same))
    run(replace(first, output=same, resume=True))


def test_an_interrupted_run_goes_on(request_for: Callable[..., CalibrationRequest], tmp_path: Path) -> None:
    def stop_later(phase: str, done: int, *_: object) -> None:
        if phase == "one token" and done >= 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(request_for(), stop_later)
    (state,) = (tmp_path / "out").glob("state-*.jsonl")
    kept = len(state.read_text().splitlines())
    assert not (tmp_path / "out" / "report.json").exists()
    with pytest.raises(CalibrationError, match="--resume continues it"):
        run(request_for())
    work: dict[str, list[int]] = {}
    run(request_for(resume=True), lambda phase, done, *_: work.setdefault(phase, []).append(done))
    assert work["one token"][0] == 8
    assert work["exact"][0] == 0
    assert len(state.read_text().splitlines()) > kept
    again: dict[str, list[int]] = {}
    bolder = replace(OPTIONS, max_drop=0.5)
    run(
        request_for(resume=True, name="bolder", options=bolder, store=False),
        lambda phase, done, *_: again.setdefault(phase, []).append(done),
    )
    assert again["one token"] == [len(WORDS)], "nothing is decoded again"
    assert again["tau 0.999"] == [len(WORDS)] * 2, "as the answers to verify, and as a candidate"


@pytest.mark.parametrize("name", ["threads", "rows", "onnxruntime", "processor", "batch"])
def test_measurements_under_other_conditions_are_not_continued(
    request_for: Callable[..., CalibrationRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def stop(phase: str, *_: object) -> None:
        if phase == "one token":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(request_for(), stop)
    changes = {"threads": {"threads": 2}, "batch": {"options": replace(OPTIONS, batch=2)}}.get(name, {})
    if name == "rows":
        task = tmp_path / "words.jsonl"
        task.write_text(task.read_text().replace("thin air", "thick air"))
    elif name == "onnxruntime":
        monkeypatch.setattr("mars_export.calibration.tau.run.version_and_devices", lambda: ("9.9", []))
    elif name == "processor":
        monkeypatch.setattr("mars_export.runtime.machine.processor", lambda: "another one")
    with pytest.raises(CalibrationError, match=rf"the state of a run with another {name}"):
        run(request_for(resume=True, **changes))


def test_a_state_belongs_to_a_device(request_for: Callable[..., CalibrationRequest]) -> None:
    request = request_for()
    session = request.open()
    plan = make_plan(session, request.rows())
    here = conditions(request, session, plan)
    session.device = "cuda"
    there = conditions(request, session, plan)
    assert {key for key in here if here[key] != there[key]} == {"device"}


def test_the_time_and_what_can_be_shown_are_said_before_anything_is_decoded(
    request_for: Callable[..., CalibrationRequest],
) -> None:
    said: list[tuple[str, int, int, str]] = []
    run(request_for(), lambda *told: said.append(told))
    phase, done, total, note = said[0]
    assert (phase, done, total) == ("rows", 0, 0)
    assert re.fullmatch(
        r"16 rows can show a drop below 0\.\d+ if no answer gets worse; this takes at most about \d+ (s|min)",
        note,
    )
    assert said[1][:3] == ("one token", 0, 16)
    assert all(re.fullmatch(r"\d+ tokens, at most \d+ (s|min) left", note) for *_, note in said[1:])
    assert said[-1][:2] == ("speed", said[-1][2]) and "at most 0 s left" in said[-1][3]
