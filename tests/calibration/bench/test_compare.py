"""Settings compared by made-up laps: speeds and their ratios, scores and their intervals."""

from __future__ import annotations

import pytest
from support.calibrations import answer, lap, task

from mars_export.calibration.bench import compare, wilson
from mars_export.calibration.options import Setting
from mars_export.calibration.rounds import Percentiles, Rounds


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [
        (7, 8, 0.529, 0.978),
        (6, 8, 0.409, 0.929),
        (0, 10, 0.0, 0.278),
        (10, 10, 0.722, 1.0),
        (50, 100, 0.404, 0.596),
    ],
)
def test_the_interval_of_a_score_is_wilsons(right: float, count: int, low: float, high: float) -> None:
    assert wilson(right, count) == (pytest.approx(low, abs=1e-3), pytest.approx(high, abs=1e-3))
    assert wilson(right, count, 0.99)[1] >= wilson(right, count)[1]


def test_speeds_are_of_rounds_and_ratios_of_the_same_round() -> None:
    one, fast = Setting(1), Setting(1, 0.5)
    same, other = answer([1, 2, 3, 4], 2), answer([1, 2, 3, 9], 2)
    plain = answer([1, 2, 3, 4], 4)
    laps = {
        one: [
            lap(4.0, plain) + lap(4.0, plain),
            lap(40.0, plain) + lap(40.0, plain),
            lap(4.0, plain) + lap(4.0, plain),
        ],
        fast: [
            lap(2.0, same) + lap(2.0, other),
            lap(10.0, same) + lap(10.0, other),
            lap(2.0, same) + lap(2.0, same),
        ],
    }
    first, second = compare([task("x"), task("y")], laps)
    assert first.speed_up == Rounds(1.0, 1.0, 1.0)
    assert first.tokens_per_second == Rounds(1.0, 0.1, 1.0)
    assert second.speed_up == Rounds(2.0, 2.0, 4.0), "a busy round slows both down"
    assert (first.tokens_per_forward, second.tokens_per_forward) == (1.0, 2.0)
    assert (second.score, second.same_answers, second.unsteady) == (0.5, 0.5, 1)
    assert (second.answers, second.tokens) == (2, 8)
    assert second.itl == Percentiles(0.2, pytest.approx(0.2), 6)
    assert second.requests_per_second == Rounds(0.5, 0.1, 0.5)
    assert second.answer_p95 == pytest.approx(0.3)
