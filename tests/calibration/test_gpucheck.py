"""The proof of a device, on the CPU with a tiny bundle: each check runs, and a wrong device is found out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from support.fake_ort_cuda import FakeOrt
from support.missing import need
from support.tiny import Named
from typer.testing import CliRunner

from mars_export.calibration.gpucheck import checks, figures
from mars_export.calibration.gpucheck.gpucheck import CHECKS, CheckRequest, gpucheck, make
from mars_export.calibration.gpucheck.outcome import CheckReport, Outcome
from mars_export.calibration.gpucheck.page import markdown
from mars_export.calibration.gpucheck.subject import Clocked, Subject
from mars_export.cli import app
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import ExportOptions, export_onnx
from mars_export.runtime import CalibrationError, SessionError
from mars_export.runtime.device import ort

Ask = Callable[..., CheckRequest]


@pytest.fixture
def ask(bundles: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    monkeypatch.setattr(figures, "CAPACITIES", (64,))
    monkeypatch.setattr(figures, "STEP_ROUNDS", 1)
    monkeypatch.setattr(figures, "ROUNDS", 1)
    monkeypatch.setattr(figures, "BATCHES", (1, 2))
    monkeypatch.setattr(figures, "PROMPTS_OF_FIRST", (8,))
    subject = Subject(bundles("qwen2"), "cpu", threads=1, rows=4, requests=16)
    return lambda **changes: replace(CheckRequest(subject, tmp_path / "out"), **changes)


def states(report: CheckReport) -> dict[str, str]:
    return {outcome.name: outcome.state for outcome in report.outcomes}


def test_every_check_runs_and_what_this_machine_cannot_show_says_why(ask: Ask) -> None:
    report = gpucheck(ask())
    found = {outcome.name: outcome for outcome in report.outcomes}
    absent = {name: o.detail for name, o in found.items() if o.state == "not run"}
    assert {n: o.detail for n, o in found.items() if o.state == "failed"} == {}
    assert absent.keys() <= {"tokens", "prefix", "sampling", "growth", "grammar", "graphs"}
    assert "the CPU itself" in absent["tokens"]
    assert found["exact"].figures["equal"] == 4
    assert found["speed"].figures["modes"]["exact"]["tokens_per_second"] > 0
    assert "refused in words" in found["recovery"].detail
    assert report.is_good
    text = (ask().folder / "gpucheck.md").read_text()
    assert text == markdown(report) and text.count("\n| ") == len(CHECKS) + 1
    assert json.loads((ask().folder / "gpucheck.json").read_text())["good"] is True


def test_a_run_in_parts_is_one_report_and_what_passed_is_not_made_again(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = gpucheck(ask(only=("opens",)))
    assert states(first)["opens"] == "passed" and states(first)["exact"] == "not run"
    monkeypatch.setattr(checks, "opens", None)  # would fail if it were called
    second = gpucheck(ask(only=("opens", "kv")))
    assert states(second) | {"opens": "passed", "kv": "passed"} == states(second)


@pytest.mark.parametrize(
    ("fake", "state", "words"),
    [
        (FakeOrt(), "passed", "steps captured; 2 of 2 answers as from plain steps"),
        (FakeOrt(refusal="not all on the GPU"), "failed", "steps are not captured: not all on the GPU"),
        (FakeOrt(stale=True), "failed", "does not say what the same step says plainly; 2 of 2 answers"),
    ],
)
def test_captured_steps_are_proven_or_said_not_to_be(
    fake: FakeOrt, state: str, words: str, bundles: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bundles("qwen2")
    monkeypatch.setattr(ort, "_import", lambda device: fake if device == "cuda" else onnxruntime)
    outcome = make("graphs", Subject(path, "cuda", rows=2))
    assert (outcome.state, words in outcome.detail) == (state, True), outcome.detail
    assert make("graphs", Subject(path, "cpu")).state == "not run"


def test_an_answer_keeps_to_the_words_it_may_choose_from(
    checkpoints: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("llguidance", "grammar")
    options = ExportOptions(block=4, top_k=16, logits=True)
    export_onnx(open_checkpoint(str(checkpoints("qwen2"))), tmp_path / "b", options)
    subject = Subject(tmp_path / "b", "cpu", threads=1, rows=2)
    found = make("grammar", subject)
    assert found.state == "passed", found.detail
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    assert make("grammar", subject).state == "not run"


def test_a_backend_that_answers_wrong_in_wide_steps_is_found_out(ask: Ask) -> None:
    subject = ask().subject
    inner = subject.session.backend

    class Wrong(Clocked):
        def step(self, cache: Any, first: int, input_ids: np.ndarray, *rest: Any) -> Any:
            found = inner.step(cache, first, input_ids, *rest)
            if input_ids.shape[1] > 2:
                found.token_ids[:] = (found.token_ids + 1) % 7
            return found

    subject.session.backend = Wrong(inner)
    try:
        outcome = make("exact", subject)
        assert outcome.state == "failed" and outcome.figures["equal"] < 4
    finally:
        subject.session.backend = inner


def test_what_breaks_is_an_outcome_and_the_others_are_made(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (SessionError("no memory"), MemoryError(), RuntimeError("CUDA error 700")):

        def fails(_: Subject, error: Exception = error) -> None:
            raise error

        monkeypatch.setitem(CHECKS, "kv", ("KV rows", fails))  # type: ignore[arg-type]
        report = gpucheck(ask(only=("opens", "kv"), force=True))
        kv = next(o for o in report.outcomes if o.name == "kv")
        assert (kv.state, kv.detail) == ("failed", str(error) or "MemoryError")
        assert states(report)["opens"] == "passed" and not report.is_good


def test_ctrl_c_ends_it_and_keeps_what_was_done(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Subject) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(CHECKS, "kv", ("KV rows", interrupted))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        gpucheck(ask())
    kept = json.loads((ask().folder / "gpucheck.json").read_text())["outcomes"]
    assert kept[0]["state"] == "passed" and kept[1]["state"] == "not run"


def test_heavy_operators_on_the_cpu_fail(ask: Ask) -> None:
    subject = ask().subject
    backend: Any = subject.session.backend
    backend.on_cpu = {"Shape": 3}
    assert make("opens", subject).state == "passed"
    backend.on_cpu = {"Shape": 3, "Attention": 2}
    outcome = make("opens", subject)
    assert outcome.state == "failed" and "2 Attention" in outcome.detail
    backend.on_cpu = {}


def test_a_store_that_keeps_nothing_fails(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = ask().subject
    monkeypatch.setattr(checks, "PIECE", 1)
    monkeypatch.setattr(checks, "LONG", 40)  # less than a piece: as if nothing were kept
    assert make("prefix", subject).state == "failed"


def test_memory_that_grows_fails(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter((1 << 30, 3 << 30, 1 << 30, 1 << 30))
    monkeypatch.setattr("mars_export.calibration.gpucheck.subject.memory_used", lambda _: next(used))
    subject = ask().subject
    _ = subject.session  # on the CPU, said to be a GPU
    subject.device = "cuda"
    assert make("growth", subject).state == "failed"
    assert make("growth", subject).state == "passed"


def test_unknown_names_and_another_bundles_state_are_refused(ask: Ask) -> None:
    with pytest.raises(CalibrationError, match="unknown checks: speeed"):
        ask(only=("speeed",))
    gpucheck(ask(only=("opens",)))
    other = replace(ask().subject, rows=5)
    with pytest.raises(CalibrationError, match="state of other work"):
        gpucheck(ask(subject=other, only=("opens",)))


def test_the_command(bundles: Named, tmp_path: Path) -> None:
    folder = tmp_path / "page"
    shutil.rmtree(folder, ignore_errors=True)
    command = [
        "gpucheck",
        str(bundles("qwen2")),
        "--device",
        "cpu",
        "--only",
        "opens,recovery",
        "-o",
        str(folder),
    ]
    done = CliRunner().invoke(app, [*command, "--rows", "4"])
    assert done.exit_code == 0, done.output
    assert "2 passed, 14 not run" in done.output.replace("\n", " ")
    done = CliRunner().invoke(app, [*command, "--rows", "4", "--json"])
    outcomes = [Outcome(**o) for o in json.loads(done.stdout)["outcomes"]]
    assert [o.name for o in outcomes if o.state == "passed"] == ["opens", "recovery"]
    done = CliRunner().invoke(app, ["gpucheck", str(bundles("qwen2")), "-o", str(tmp_path / "gpu")])
    assert done.exit_code == 1
