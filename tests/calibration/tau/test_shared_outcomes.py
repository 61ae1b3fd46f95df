"""What is decoded at a tau is known for every riskier tau that accepts the same tokens in every step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
from support.calibrations import WORDS, task

from mars_export import Session
from mars_export.calibration.tau.decoding import decode_rows
from mars_export.calibration.tau.options import setting

TAUS = {
    "probability": (0.5, 0.2, 0.1, 0.05, 0.02, 0.0),
    "margin": (0.5, 0.1, 0.03, 0.01, 0.003, 0.0),
    "entropy": (0.5, 1.0, 2.0, 3.0, 4.0, 10.0),
}


@pytest.mark.parametrize("metric", TAUS)
def test_an_outcome_that_holds_is_that_of_decoding(sessions: Callable[[str], Session], metric: str) -> None:
    session, rows = sessions("qwen2"), [task(word, limit=16) for word in WORDS]
    decoded = {tau: list(decode_rows(session, rows, setting(tau, metric), 8)) for tau in TAUS[metric]}
    held = []
    for safer, tau in combinations(TAUS[metric], 2):
        for known, real in zip(decoded[safer], decoded[tau], strict=True):
            held.append(known.holds_at(setting(tau, metric)))
            if held[-1]:
                assert (known.token_ids, known.forwards) == (real.token_ids, real.forwards)
    assert 0 < sum(held) < len(held)
