"""The guarantee, by simulation: calibrations of synthetic models whose true drop at each tau is known."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from support.paths import ROOT

from mars_export.calibration.tau import bounds

TRIALS, LEVEL = 1000, 0.05
ERROR = 3 * (LEVEL * (1 - LEVEL) / TRIALS) ** 0.5  # three standard deviations of the simulation itself
# (share of rows that lose, share that win) at each candidate, from safe to fast. The true drop is their
# difference.
CREEPING = [
    (0.002, 0.001),
    (0.008, 0.004),
    (0.016, 0.006),
    (0.035, 0.0149),
    (0.06, 0.03),
    (0.1, 0.06),
    (0.2, 0.1),
]
AT_THE_BOUND = [(0.0201, 0.0)] + [(0.0201 + 0.004 * i, 0.004 * i) for i in range(1, 10)]
NOISY = [(0.15 + 0.0201, 0.15)] * 5
UP_AND_DOWN = [(0.002, 0.001), (0.0221, 0.002), (0.003, 0.001), (0.0251, 0.005), (0.001, 0.0)]
MODELS = {"creeping": CREEPING, "at the bound": AT_THE_BOUND, "noisy": NOISY}
BOUND = 0.02
Procedure = Callable[[np.ndarray], list[int]]
"""drops [candidates, trials, rows] -> per trial the chosen candidate, -1 for none."""


def simulate(model: list[tuple[float, float]], rows: int, graded: bool = False, seed: int = 0) -> np.ndarray:
    """Paired drops [candidates, TRIALS, rows]. A row's luck is the same at all taus: what breaks early mostly
    stays broken."""
    random = np.random.default_rng(seed)
    luck = random.random((TRIALS, rows))
    size = random.beta(2, 2, (TRIALS, rows)) if graded else np.ones((TRIALS, rows))
    scale = 2.0 if graded else 1.0  # graded losses are half as large on average and twice as frequent
    return np.stack(
        [size * ((luck < scale * lose).astype(float) - (luck > 1 - scale * win)) for lose, win in model]
    )


def fixed_sequence(drops: np.ndarray) -> list[int]:
    """What calibrate does: from safe to fast, until the first that does not pass."""
    passed = np.stack([bounds.p_value(candidate, BOUND, LEVEL) <= LEVEL for candidate in drops])
    return [int(column.argmin()) - 1 if not column.all() else len(column) - 1 for column in passed.T]


def worst_that_passed(model: list[tuple[float, float]]) -> Procedure:
    """What calibrate may do at worst: of all that passed it takes the one that truly loses most."""
    true = [lose - win for lose, win in model]
    return lambda drops: [
        max(range(last + 1), key=true.__getitem__, default=-1) for last in fixed_sequence(drops)
    ]


def best_looking(drops: np.ndarray) -> list[int]:
    """The invalid habit: the fastest tau whose mean drop on the data is below the bound, with no
    correction."""
    good = drops.mean(axis=2) < BOUND
    return [int(np.flatnonzero(column).max()) if column.any() else -1 for column in good.T]


def broken(model: list[tuple[float, float]], chosen: list[int]) -> float:
    """Share of trials whose choice truly loses more than the bound."""
    true = [lose - win for lose, win in model]
    return sum(i >= 0 and true[i] > BOUND for i in chosen) / TRIALS


@pytest.mark.parametrize("graded", [False, True], ids=["right or wrong", "graded"])
@pytest.mark.parametrize("name", [*MODELS, "up and down"])
def test_any_choice_among_those_that_passed_keeps_the_guarantee(name: str, graded: bool) -> None:
    """By speed, by lot or by malice: the sequence bounds the chance that any should not have passed."""
    model = MODELS.get(name, UP_AND_DOWN)
    chosen = worst_that_passed(model)(simulate(model, 500, graded, seed=1))
    assert broken(model, chosen) <= LEVEL + ERROR
    assert chosen != fixed_sequence(simulate(model, 500, graded, seed=1)) or name in (
        "creeping",
        "at the bound",
    )


@pytest.mark.parametrize("rows", [100, 250, 1000])
def test_at_any_number_of_rows(rows: int) -> None:
    assert broken(AT_THE_BOUND, fixed_sequence(simulate(AT_THE_BOUND, rows, seed=rows))) <= LEVEL + ERROR


@pytest.mark.parametrize("name", MODELS)
def test_choosing_the_best_looking_tau_fails_the_same_test(name: str) -> None:
    assert broken(MODELS[name], best_looking(simulate(MODELS[name], 500))) > 5 * LEVEL


def test_it_has_the_power_to_pass() -> None:
    """Half a point is lost where two are allowed: nearly always passed with 1000 rows, mostly with 500."""
    safe = [(0.006, 0.002)]
    shares = [np.mean(np.array(fixed_sequence(simulate(safe, rows))) == 0) for rows in (500, 1000)]
    assert shares[0] > 0.7
    assert shares[1] > 0.93


def test_the_upper_bound_covers() -> None:
    drops = simulate([(0.03, 0.01)], 300)[0][:300]
    assert (
        np.mean([bounds.upper_bound(row, LEVEL) < 0.02 for row in drops]) <= LEVEL + 3 * (LEVEL / 300) ** 0.5
    )


def test_bound_and_p_value_say_the_same() -> None:
    for row in simulate([(0.012, 0.008)], 400)[0][:50]:
        bound = bounds.upper_bound(row, LEVEL)
        assert bounds.p_value(row, bound + 1e-4, LEVEL) <= LEVEL < bounds.p_value(row, bound - 1e-4, LEVEL)


def test_an_interval_holds_its_mean_and_stays_within_the_scale() -> None:
    scores = (np.random.default_rng(0).random(500) < 0.85).astype(float)
    low, high = bounds.interval(scores, LEVEL)
    assert 0 < low < scores.mean() < high < 1
    assert high - low < 0.1
    assert bounds.interval(np.ones(3), LEVEL)[1] == 1


@pytest.mark.parametrize("level", [0.1, 0.05, 0.05 / 3])
@pytest.mark.parametrize("bound", [0.005, 0.01, 0.02, 0.05, 0.1, 0.5])
def test_rows_needed_is_the_smallest_number_that_suffices(bound: float, level: float) -> None:
    needed = bounds.items_needed(bound, level)
    assert (
        bounds.p_value(np.zeros(needed), bound, level)
        <= level
        < bounds.p_value(np.zeros(needed - 1), bound, level)
    )


def test_a_bound_of_nothing_cannot_be_shown() -> None:
    with pytest.raises(ValueError, match="zero or less"):
        bounds.items_needed(0.0, LEVEL)


@pytest.mark.parametrize("value", [1.0, -1.0, 0.0])
def test_constant_rows_ruin_nobody(value: float) -> None:
    values = np.full(1000, value)
    assert np.isfinite(bounds.p_value(values, BOUND, LEVEL))
    assert bounds.upper_bound(values, LEVEL) >= value - 1e-4


def test_the_table_of_rows_needed_in_the_documentation() -> None:
    text = (ROOT / "docs" / "calibration.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| (0\.\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", text, flags=re.M)
    assert len(lines) == 6
    for bound, *needed in lines:
        assert [int(n) for n in needed] == [
            bounds.items_needed(float(bound), level) for level in (0.1, 0.05, 0.05 / 3, 0.01)
        ]
