"""The acceptance rule gives what the slow rule of tests/conformance/make.py gives, of any predictions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.makers import maker

from mars_export.runtime.accept import METRICS, accept, is_one_token

EXPECTED = maker("make").expected
CONFIDENCE = st.floats(width=32) | st.sampled_from([0.0, 0.5, 0.9, 1.0])
TAU = st.floats(0, 3) | st.sampled_from([0.0, 0.5, 0.9, 1.0])
PREDICTIONS = st.lists(st.tuples(st.integers(0, 9), CONFIDENCE), max_size=12)


@given(
    PREDICTIONS,
    TAU,
    st.sampled_from(METRICS),
    st.frozensets(st.integers(0, 9), max_size=3),
    st.integers(0, 15),
)
def test_any_predictions(
    predictions: list[tuple[int, float]], tau: float, metric: str, eos_ids: frozenset[int], limit: int
) -> None:
    arguments = [token for token, _ in predictions], [c for _, c in predictions], tau, metric, eos_ids, limit
    assert accept(*arguments) == EXPECTED(*arguments)
    if is_one_token(tau, metric):
        assert accept(*arguments) <= 1
