"""`calibrate` and `profiles` from the shell: answers, bad task files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.calibrations import WORDS, by_order, laps_of, rows, shell

from mars_export import CalibrationError, MarsError
from mars_export.calibration.tau import race
from mars_export.calibration.tau.run import CalibrationRequest
from mars_export.runtime.bundle.open import open_bundle


def test_the_commands(
    request_for: Callable[..., CalibrationRequest],
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, out = request_for().task, tmp_path / "out"
    monkeypatch.setattr(race, "race", by_order)
    common = (
        "calibrate",
        bundle,
        "--task",
        task,
        "--max-drop",
        "0.4",
        "--taus",
        "0.999,0.5",
        "--threads",
        "1",
        "--batch",
        "8",
        "-o",
        out,
    )
    done = shell(*common)
    assert done.exit_code == 0, done.output
    assert "words.jsonl: tau" in done.output
    assert "report.md" in done.output
    [stored] = json.loads(shell("profiles", "list", bundle, "--json").stdout)
    assert (stored["name"], stored["masks"], stored["stale"]) == ("words", "full", [])
    assert "good" in shell("profiles", "list", bundle).stdout
    evidence = stored["evidence"]
    assert (evidence["task"], evidence["num_rows"], evidence["max_drop"]) == ("words.jsonl", 16, 0.4)
    assert len(evidence["prompt_tokens"]) == 2 and isinstance(evidence["needed"], bool)
    assert any("exact mode" in note for note in evidence["notes"])
    tau = open_bundle(bundle).manifest.profiles[0].tau
    answer = shell("generate", bundle, "-p", "hello", "--profile", "words", "--max-new-tokens", "4", "--json")
    assert json.loads(answer.stdout)["tau"] == tau
    both = shell("generate", bundle, "-p", "hello", "--profile", "words", "--tau", "0.5")
    assert "use either the profile or tau" in str(both.exception)
    unknown = shell("generate", bundle, "-p", "hello", "--profile", "sums")
    assert "(there are: words)" in str(unknown.exception)
    assert shell("profiles", "remove", bundle, "words").exit_code == 0
    assert "no profiles" in shell("profiles", "list", bundle).stdout
    assert isinstance(shell("profiles", "remove", bundle, "words").exception, MarsError)
    monkeypatch.setattr(race, "race", lambda *a: laps_of({name: [1.0] * 3 for name in a[2]}))
    done = shell(*common, "--resume")
    assert "no profile was stored, because no tau" in done.output
    assert "no profiles" in shell("profiles", "list", bundle).stdout


def test_a_bad_task_file_is_refused_before_anything_is_decoded(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(rows() + '{"messages": [], "answer"')
    done = shell("calibrate", bundle, "--task", tmp_path / "bad.jsonl", "-o", tmp_path / "out")
    assert isinstance(done.exception, CalibrationError)
    assert f"line {len(WORDS) + 1}: not JSON" in str(done.exception)
    assert not (tmp_path / "out").exists()
