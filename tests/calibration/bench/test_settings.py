"""The settings that a benchmark compares: which, in which order, and values out of range."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from mars_export import CalibrationError
from mars_export.calibration.options import BenchOptions, Setting


def test_one_token_mode_comes_first_and_nothing_twice() -> None:
    options = BenchOptions(taus=(0.9, 1.0, 0.9), batches=(1, 4, 1), masks=("auto", 1), exact=False)
    settings = options.settings
    assert settings[0] == Setting(1)
    assert len(set(settings)) == len(settings) == 2 * (1 + 2)
    assert next(s for s in settings if s.batch == 4) == Setting(4)
    both = replace(options, exact=True).settings
    exact = [s for s in both if s.tau is None]
    assert exact == [Setting(batch, None, masks) for batch in (1, 4) for masks in ("auto", 1)]
    assert [s for s in both if s.tau is not None] == list(settings)
    assert both[:2] == (Setting(1), Setting(1, None)), "exact beside one token, in every round"
    assert Setting(1, None).config(3).exact
    assert BenchOptions(taus=()).settings == (Setting(1), Setting(1, None)), "no tau has to be compared"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batches": (0,)}, "batch must be 1 or more, not 0"),
        ({"taus": (math.nan,)}, "tau must be a number of 0 or more, not nan"),
        ({"taus": (-0.5,)}, "tau must be a number of 0 or more"),
        ({"taus": (), "exact": False}, "give at least one tau"),
        ({"masks": ("wide",)}, "masks must be .* not 'wide'"),
        ({"masks": (-1,)}, "masks must be"),
        ({"rounds": 0, "limit": 0}, "rounds must be 1 or more, not 0; limit must be"),
        ({"batches": (0,), "taus": (math.inf,)}, "batch must be .*; tau must be"),
    ],
)
def test_options_out_of_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        BenchOptions(**values)
