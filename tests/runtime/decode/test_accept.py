"""The acceptance rule: what must be true of any predictions (test_conformance.py has what it gives)."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mars_export.runtime.accept import METRICS, accept, is_one_token

CONFIDENCE = st.floats(width=32) | st.sampled_from([0.0, 0.5, 0.9, 1.0])
TAU = st.floats(0, 3) | st.sampled_from([0.0, 0.5, 0.9, 1.0])
PREDICTIONS = st.lists(st.tuples(st.integers(0, 9), CONFIDENCE), max_size=12)
METRIC = st.sampled_from(METRICS)
EOS = st.frozensets(st.integers(0, 9), max_size=3)
LIMIT = st.integers(0, 15)


def accepted(
    predictions: list[tuple[int, float]], tau: float, metric: str, eos_ids: frozenset[int], limit: int
) -> int:
    return accept(
        [token for token, _ in predictions], [c for _, c in predictions], tau, metric, eos_ids, limit
    )


@given(PREDICTIONS, TAU, METRIC, EOS, LIMIT)
def test_one_at_least_and_never_more_than_there_are_or_may_be(
    predictions: Any, tau: float, metric: str, eos_ids: Any, limit: int
) -> None:
    count = accepted(predictions, tau, metric, eos_ids, limit)
    assert min(1, limit, len(predictions)) <= count <= min(limit, len(predictions))
    if is_one_token(tau, metric):
        assert count <= 1


@given(PREDICTIONS, TAU, METRIC, EOS, LIMIT)
def test_all_that_is_accepted_passed_and_the_next_did_not(
    predictions: Any, tau: float, metric: str, eos_ids: Any, limit: int
) -> None:
    count = accepted(predictions, tau, metric, eos_ids, limit)
    passed = [c <= tau if metric == "entropy" else c >= tau for _, c in predictions]
    assert all(passed[1:count])
    assert not any(token in eos_ids for token, _ in predictions[: max(count - 1, 0)])
    if 0 < count < min(limit, len(predictions)) and not is_one_token(tau, metric):
        assert not passed[count] or predictions[count - 1][0] in eos_ids


@given(PREDICTIONS, TAU, METRIC, EOS, LIMIT, st.integers(0, 12))
def test_what_comes_later_changes_nothing_before_it(
    predictions: Any, tau: float, metric: str, eos_ids: Any, limit: int, cut: int
) -> None:
    whole = accepted(predictions, tau, metric, eos_ids, limit)
    assert accepted(predictions[:cut], tau, metric, eos_ids, limit) == min(whole, cut)


@given(PREDICTIONS, TAU, TAU, METRIC, EOS, LIMIT)
def test_a_laxer_tau_never_accepts_less(
    predictions: Any, a: float, b: float, metric: str, eos_ids: Any, limit: int
) -> None:
    strict, lax = (min(a, b), max(a, b)) if metric == "entropy" else (max(a, b), min(a, b))
    assert accepted(predictions, strict, metric, eos_ids, limit) <= accepted(
        predictions, lax, metric, eos_ids, limit
    )
