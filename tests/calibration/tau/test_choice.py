"""The choice of tau, from the task to the profile: the fastest that passed, or one token."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.calibrations import OPTIONS, WORDS, by_order, laps_of, rows

from mars_export import CalibrationError, Session
from mars_export.calibration.tau import bounds, race
from mars_export.calibration.tau.calibrate import Calibrator
from mars_export.calibration.tau.options import CalibrationOptions, name_of
from mars_export.calibration.tau.run import CalibrationRequest, run
from mars_export.runtime.bundle.open import open_bundle


def test_from_task_to_profile_to_answer(
    request_for: Callable[..., CalibrationRequest],
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = race.race
    # Run as it is, but what a busy machine says of so short answers decides nothing here.
    monkeypatch.setattr(race, "race", lambda *a: by_order(*a) if real(*a) else {})
    made = run(request_for())
    calibration = made.calibration
    assert calibration.num_rows == len(WORDS)
    assert [t.passed for t in calibration.tested] == [True] * 4
    assert calibration.chosen is not None
    config = Session.open(bundle, threads=1).profile("words")
    assert config.tau == calibration.chosen.measured.tau
    evidence = open_bundle(bundle, full=True).manifest.profiles[0].evidence
    assert evidence["task"] == "words.jsonl"
    assert str(tmp_path) not in json.dumps(dict(evidence))


def test_testing_ends_at_the_first_failure(
    request_for: Callable[..., CalibrationRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "words.jsonl").write_text(rows(answer=None, score="agreement"))
    monkeypatch.setattr(race, "race", by_order)
    made = run(request_for(store=False)).calibration
    passed = [t.passed for t in made.tested]
    assert passed == [True] * (len(passed) - 1) + [False], "tau 0 cannot pass: nothing agrees there"
    for t in made.tested:
        assert t.drop == pytest.approx(1 - t.measured.agreement)
        assert t.passed == (t.p_value <= 0.05)
    assert made.chosen == (made.tested[-2] if len(passed) > 1 else None)


def test_the_choice_is_the_fastest_that_passed_and_says_so(
    request_for: Callable[..., CalibrationRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: list[list[str]] = []
    table = {
        "one token": 10.0,
        "tau 0.999": 12.0,
        "tau 0.9": 44.0,
        "tau 0.5": 45.0,
        "tau 0": 20.0,
        "exact": 30.0,
    }

    def speeds(*arguments: Any) -> race.Laps:
        fields.append(list(arguments[2]))
        return laps_of({name: [table[name]] * 3 for name in arguments[2]})

    monkeypatch.setattr(race, "race", speeds)
    monkeypatch.setattr(Calibrator, "predicted_speed", lambda _, __, config: table[name_of(config)])
    made = run(request_for())
    calibration = made.calibration
    assert [t.passed for t in calibration.tested] == [True] * 4
    agreement = {t.measured.name: t.measured.agreement for t in calibration.tested}
    tie = max(("tau 0.9", "tau 0.5"), key=agreement.__getitem__)
    assert fields == [["one token", tie, "exact"]], "in the same rounds: the safer of the two fastest"
    assert calibration.chosen is not None
    assert calibration.chosen.measured.name == tie
    assert [t.measured.tokens_per_second for t in calibration.tested] == [12.0, 44.0, 45.0, 20.0]
    assert calibration.one_token.tokens_per_second == 10.0
    ratio = {"tau 0.9": "4.40", "tau 0.5": "4.50"}[tie]
    assert calibration.choice is not None
    assert f"{tie}, {ratio}x the speed of one-token mode" in calibration.choice
    assert (
        "others that passed, but are slower by their forwards, or tie and are riskier: 3"
        in calibration.choice
    )
    assert ("choice", calibration.choice) in made.facts
    assert [line[-1] for line in made.table].count("chosen") == 1
    assert [line[-3:-1] for line in made.table[2:]].count(("~20", "")) == 1, "predicted"
    assert f"{ratio} times the speed of one-token mode" in made.headline
    lead = {"tau 0.9": 44 / 30, "tau 0.5": 45 / 30}[tie]
    assert (
        made.verdict
        == f"{tie.capitalize()} is {lead:.2f}x as fast as exact mode, which gives the one-token text."
    )
    assert not calibration.exact.suffices
    assert made.profile is not None and made.profile.evidence["needed"] is True


def test_nothing_faster_leaves_tau_at_one_and_stores_no_profile(
    request_for: Callable[..., CalibrationRequest], bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        race, "race", lambda *a: laps_of({name: [10.0 - i] * 3 for i, name in enumerate(a[2])})
    )
    made = run(request_for())
    assert "One token is 1.25x as fast as exact mode" in str(made.verdict)
    assert made.table[1][-1] == "lossless"
    assert all(t.passed for t in made.calibration.tested)
    assert made.calibration.chosen is None
    assert "no setting that passed was faster than one-token mode" in str(made.calibration.choice)
    assert "No setting that passed was shown to be faster" in made.headline
    assert made.profile is None
    assert open_bundle(bundle).manifest.profiles == ()


def test_too_few_rows_are_an_error_before_anything_is_decoded(
    request_for: Callable[..., CalibrationRequest], tmp_path: Path
) -> None:
    needed = bounds.items_needed(0.02, 0.05)
    with pytest.raises(
        CalibrationError, match=rf"16 rows cannot show .* {needed} are needed.*--no-guarantee"
    ):
        run(request_for(options=replace(OPTIONS, max_drop=0.02)))
    assert not (tmp_path / "out").exists()


def test_without_a_guarantee_the_mean_drop_of_the_rows_decides(
    request_for: Callable[..., CalibrationRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "race", by_order)
    made = run(request_for(options=replace(OPTIONS, max_drop=0.02, guarantee=False)))
    assert [t.passed for t in made.calibration.tested] == [True] * 4
    assert all(t.p_value > 0.05 for t in made.calibration.tested)
    assert made.calibration.notes[0].startswith("--no-guarantee: the mean drop of these rows decided")
    assert "on these rows" in made.headline and "confidence" not in made.headline
    assert made.profile is not None and made.profile.evidence["confidence"] is None
    assert ("bound", "mean drop of these rows below 2 points, without a guarantee") in made.facts


def test_short_answers_cannot_be_helped(
    request_for: Callable[..., CalibrationRequest], tmp_path: Path
) -> None:
    (tmp_path / "words.jsonl").write_text(rows(max_new_tokens=3))
    made = run(request_for())
    assert made.calibration.chosen is None
    assert "which tau cannot speed up" in made.calibration.notes[0]


def test_three_metrics_share_the_error(request_for: Callable[..., CalibrationRequest]) -> None:
    options = CalibrationOptions(max_drop=0.5, metrics=("probability", "margin", "entropy"), batch=8)
    made = run(request_for(options=options)).calibration
    assert options.level == pytest.approx(0.05 / 3)
    assert {t.measured.metric for t in made.tested} == set(options.metrics)
    for t in made.tested:
        assert t.passed == (t.p_value <= 0.05 / 3)
