"""The acceptance rule: exactly what tests/conformance holds, and what must be true of any predictions."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paths import CONFORMANCE

from mars_export.runtime.accept import METRICS, accept, is_one_token
from mars_export.runtime.decode.pace.draft import DraftSlots
from mars_export.runtime.decode.sample import uniform


def cases(name: str) -> list[dict[str, Any]]:
    return json.loads((CONFORMANCE / name).read_text(encoding="utf-8"))


def maker() -> ModuleType:
    spec = spec_from_file_location("conformance_make", CONFORMANCE / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("case", cases("accept.json"), ids=lambda case: case["name"])
def test_accept_gives_exactly_the_conformance_file(case: dict[str, Any]) -> None:
    confidences = [float(c) for c in case["confidences"]]
    assert (
        accept(case["token_ids"], confidences, case["tau"], case["metric"], case["eos_ids"], case["limit"])
        == case["accepted"]
    )


def test_uniform_gives_exactly_the_conformance_file() -> None:
    for case in cases("uniform.json"):
        assert uniform(int(case["seed"]), case["position"]) == case["numerator"] / 2**53


def test_draft_slots_feed_exactly_the_conformance_file() -> None:
    for case in cases("drafts.json"):
        slots = DraftSlots.of(case["adapter"], case["vocab_size"], case["low"], case["high"])
        assert slots.ids(case["position"], case["count"]) == case["ids"], case


def test_the_conformance_files_are_what_their_script_writes() -> None:
    for path, text in maker().files().items():
        assert path.read_text(encoding="utf-8") == text, (
            f"run tests/conformance/make.py and read the diff of {path.name}"
        )


def test_the_script_s_splitmix64_is_the_published_one() -> None:
    assert maker().splitmix64(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


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
