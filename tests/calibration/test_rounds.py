"""What is said of numbers that were measured in rounds."""

from __future__ import annotations

import pytest

from mars_export.calibration.rounds import Percentiles, Rounds


def test_percentiles_between_neighbours() -> None:
    found = Percentiles.of([float(n) for n in range(101)])
    assert found == Percentiles(50.0, 99.0, 101)
    assert Percentiles.of([3.0]) == Percentiles(3.0, 3.0, 1)
    assert Percentiles.of([1.0, 2.0]) == Percentiles(1.5, pytest.approx(1.99), 2)
    assert Percentiles.of([]) is None
    assert Rounds.of([3.0, 1.0, 9.0]) == Rounds(3.0, 1.0, 9.0)
