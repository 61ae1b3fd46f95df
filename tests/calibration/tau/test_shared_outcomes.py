"""The steps at a tau are known for every riskier tau, up to the first that accepts another prediction."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
from support.calibrations import WORDS, task

from mars_export import Session
from mars_export.calibration.rows import make_plan
from mars_export.calibration.tau.decoding import decode_rows
from mars_export.calibration.tau.options import setting

TAUS = {
    "probability": (0.5, 0.2, 0.1, 0.05, 0.02, 0.0),
    "margin": (0.5, 0.1, 0.03, 0.01, 0.003, 0.0),
    "entropy": (0.5, 1.0, 2.0, 3.0, 4.0, 10.0),
}


@pytest.mark.parametrize("metric", TAUS)
def test_shared_steps_are_those_of_decoding(sessions: Callable[[str], Session], metric: str) -> None:
    session = sessions("qwen2")
    rows = make_plan(session, [task(word, limit=16) for word in WORDS]).tasks
    decoded = {tau: list(decode_rows(session, rows, setting(tau, metric), 8)) for tau in TAUS[metric]}
    shared = []
    for safer, tau in combinations(TAUS[metric], 2):
        config, others = setting(tau, metric), []
        for row, known, real in zip(rows, decoded[safer], decoded[tau], strict=True):
            num = known.num_shared(config)
            assert known.steps[:num] == real.steps[:num]
            if num == len(known.steps):
                assert known.output == real.output
            else:
                others.append((row, known, real))
            shared.append((num == len(known.steps), num > 0))
        tasks, begun = [row for row, *_ in others], [known for _, known, _ in others]
        for made, (*_, real) in zip(decode_rows(session, tasks, config, 8, begun), others, strict=True):
            assert (made.output, made.finish_reason) == (real.output, real.finish_reason)
            assert (made.forwards, made.steps) == (real.forwards, real.steps)
    assert len(set(shared)) == 3, "all steps, some, none"
