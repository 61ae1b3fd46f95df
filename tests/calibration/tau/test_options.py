"""Options of a calibration that are out of range."""

from __future__ import annotations

from typing import Any

import pytest

from mars_export import CalibrationError
from mars_export.calibration.tau.options import CalibrationOptions


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_drop": 0}, "max_drop must be between 0 and 1"),
        ({"confidence": 1.0}, "confidence must be"),
        ({"metrics": ("luck",)}, "metrics must be distinct values"),
        ({"metrics": ("margin", "margin")}, "metrics must be distinct values"),
        ({"metrics": ()}, "metrics must be distinct values"),
        ({"metrics": ("margin", "entropy"), "taus": (0.9,)}, "one metric only"),
        ({"taus": (0.8, 0.9)}, "from safe to fast"),
        ({"taus": (1.0, 0.9)}, "from safe to fast"),
        ({"taus": (0.9, 0.9)}, "from safe to fast"),
        ({"taus": (float("nan"),)}, "from safe to fast"),
        ({"metrics": ("entropy",), "taus": (0.5, 0.2)}, "from safe to fast"),
        ({"limit": 0, "batch": 0}, "limit must be 1 or more, not 0; batch must be"),
    ],
)
def test_options_out_of_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        CalibrationOptions(**values)
