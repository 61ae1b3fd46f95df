"""Exact mode beside the taus: whether it suffices, and what is said of it where texts differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.calibrations import OPTIONS, WORDS, laps_of, rows

from mars_export.calibration.tau import race
from mars_export.calibration.tau.calibrate import Calibrator
from mars_export.calibration.tau.decoding import Outcome
from mars_export.calibration.tau.options import CalibrationOptions, name_of, setting
from mars_export.calibration.tau.race import compare_exact
from mars_export.calibration.tau.run import CalibrationRequest, run
from mars_export.runtime.bundle.open import open_bundle


@pytest.mark.parametrize(
    ("exact", "said"), [(44.5, "as fast, within the margin of a tie, as"), (90.0, "faster than")]
)
def test_where_exact_mode_is_as_fast_no_profile_is_needed(
    request_for: Callable[..., CalibrationRequest],
    bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    exact: float,
    said: str,
) -> None:
    speeds = {
        "one token": 10.0,
        "tau 0.999": 12.0,
        "tau 0.9": 20.0,
        "tau 0.5": 45.0,
        "tau 0": 20.0,
        "exact": exact,
    }
    monkeypatch.setattr(race, "race", lambda *a: laps_of({name: [speeds[name]] * 3 for name in a[2]}))
    monkeypatch.setattr(Calibrator, "predicted_speed", lambda _, __, config: speeds[name_of(config)])
    made = run(request_for())
    found = made.calibration.exact
    assert found.suffices
    assert f"Exact mode is {said} tau 0.5 ({exact / 10:.2f}x the speed of one-token mode)" in str(
        made.verdict
    )
    assert str(made.verdict).endswith("gives the one-token text: no profile is needed.")
    assert made.calibration.chosen is not None, "for those who want it all the same"
    assert made.calibration.chosen.measured.name == "tau 0.5"
    line = next(line for line in made.table if line[1] == "exact")
    assert line[2] == made.table[0][2], "the quality of one-token mode, by construction"
    assert line[5] == "100 %" and line[-1] == "lossless, enough"
    profile = open_bundle(bundle).manifest.profiles[0]
    assert profile.tau == 0.5, "stored, and says that it is not needed"
    assert profile.evidence["needed"] is False
    assert found.verdict in profile.evidence["notes"]


@pytest.mark.parametrize(
    ("num_changed", "drops", "suffices", "said"),
    [
        (0, 0.0, True, "gives the one-token text: no profile is needed"),
        (4, 0.0, True, "in 496 of 500 rows (this precision rounds), at a mean drop of 0.0 points (below "),
        (
            100,
            1.0,
            False,
            "in 400 of 500 rows (this precision rounds), at a mean drop of 20.0 points (below ",
        ),
    ],
)
def test_where_rounding_parts_the_texts_exact_mode_must_keep_the_bound(
    num_changed: int, drops: float, suffices: bool, said: str
) -> None:
    def outcome(*ids: int) -> Outcome:
        return Outcome("", ids, 1, "eos")

    references = [outcome(1, 2)] * 500
    outcomes = [outcome(1, 3 if i % 500 < num_changed else 2) for i in range(500)]
    lost = np.array([drops if i < num_changed else 0.0 for i in range(500)])
    lost = np.random.default_rng(1).permutation(lost)
    speeds = laps_of({"one token": [10.0] * 3, "tau 0.9": [30.0] * 3, "exact": [40.0] * 3})
    options = CalibrationOptions(max_drop=0.02)
    found = compare_exact(speeds, outcomes, references, lost, (0.9, (0.85, 0.95)), "tau 0.9", options)
    assert (found.same, found.num_rows, found.suffices) == (500 - num_changed, 500, suffices)
    assert found.quality == pytest.approx(0.9 - lost.mean())
    assert found.drop <= found.drop_bound and (found.drop_bound == 0) == (num_changed == 0)
    assert said in found.verdict
    assert found.verdict.endswith("no profile is needed" if suffices else "the bound is not shown")


def test_exact_rows_that_differ_have_all_rows_decoded(
    request_for: Callable[..., CalibrationRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a graph rounded: its exact answers are those of another tau."""
    monkeypatch.setattr("mars_export.calibration.tau.calibrate.CHECK_ROWS", 8)
    monkeypatch.setattr("mars_export.calibration.tau.calibrate.EXACT", setting(0.0))
    monkeypatch.setattr("mars_export.calibration.tau.race.EXACT", setting(0.0))
    made = run(request_for(store=False, options=replace(OPTIONS, taus=(0.9,))))
    exact = made.calibration.exact
    assert exact.num_rows == len(WORDS) > exact.same
    assert exact.drop == 0.0 < exact.drop_bound, "any answer is right"
    assert next(line for line in made.table if line[1] == "exact")[-1].startswith("rounded")


def test_exact_mode_is_measured_where_no_tau_passes(
    request_for: Callable[..., CalibrationRequest], tmp_path: Path
) -> None:
    (tmp_path / "words.jsonl").write_text(rows(answer=None, score="agreement"))
    made = run(request_for(options=replace(OPTIONS, taus=(0.0,)), store=False))
    exact = made.calibration.exact
    assert made.calibration.chosen is None
    assert exact.same == exact.num_rows == len(WORDS)
    assert exact.tokens_per_forward >= 1, "nothing predicts random words, so no masks are fed"
    page = (tmp_path / "out" / "report.md").read_text()
    assert f"exact-mode check: {len(WORDS)} of {len(WORDS)} rows" in page
    assert str(made.verdict).replace("_", "") in page
    assert "one-token text" in str(made.verdict)
