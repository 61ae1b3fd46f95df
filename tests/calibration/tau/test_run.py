"""A run and its state: interrupted and resumed, beside that of another bundle."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.calibrations import OPTIONS, WORDS
from support.tiny import Named

from mars_export import CalibrationError
from mars_export.calibration.tau.run import CalibrationRequest, run


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
    with pytest.raises(CalibrationError, match="--resume uses them"):
        run(replace(first, output=same))
    run(replace(first, output=same, resume=True))


def test_an_interrupted_run_goes_on(request_for: Callable[..., CalibrationRequest], tmp_path: Path) -> None:
    def stop_later(phase: str, done: int, _: int) -> None:
        if phase == "tau 0.9" and done >= 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(request_for(), stop_later)
    (state,) = (tmp_path / "out").glob("state-*.jsonl")
    kept = len(state.read_text().splitlines())
    assert not (tmp_path / "out" / "report.json").exists()
    with pytest.raises(CalibrationError, match="--resume uses them"):
        run(request_for())
    work: dict[str, list[int]] = {}
    run(request_for(resume=True), lambda phase, done, total: work.setdefault(phase, []).append(done))
    assert work["one token"] == [len(WORDS)]
    assert work["tau 0.9"][0] == 8
    assert len(state.read_text().splitlines()) > kept
    again: dict[str, list[int]] = {}
    bolder = replace(OPTIONS, max_drop=0.5)
    run(
        request_for(resume=True, name="bolder", options=bolder, store=False),
        lambda phase, done, total: again.setdefault(phase, []).append(done),
    )
    assert again["one token"] == again["tau 0.999"] == [len(WORDS)]
