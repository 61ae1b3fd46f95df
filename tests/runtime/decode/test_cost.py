"""What a step costs: the table, and what is learned from steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.fixtures import Sessions

from mars_export import Batcher, GenerationConfig, Session
from mars_export.runtime.decode.speculation.cost import Cost, LearnedCost, built_in

RECORD = LearnedCost.record  # all other tests learn nothing
TABLE = Cost(((1, 10.0), (2, 9.0), (4, 20.0), (8, 40.0)))


def test_between_points_it_is_linear_and_it_never_falls() -> None:
    assert [TABLE.of(n) for n in (0.5, 1, 2, 3, 4, 5, 8)] == [9, 9, 9, 14.5, 20, 25, 40]
    assert TABLE.of(16) == 80
    assert TABLE.of(2.5) == 11.75
    assert Cost(((4, 2.0),)).of(100) == 2.0


def learned(seconds: Callable[[int, int], float], sizes: Sequence[int], earlier: LearnedCost) -> LearnedCost:
    """`earlier` after steps of one row with `sizes` slots; `seconds` of the slots and the step's number."""
    for n, slots in enumerate(sizes):
        RECORD(earlier, 1, slots, seconds(slots, n))
    return earlier


def fresh(*curve: tuple[int, float]) -> LearnedCost:
    return LearnedCost(Cost(curve or ((1, 1.0), (32, 2.0))))


def proportion(learned: LearnedCost, size: int) -> float:
    """What a step of `size` costs beside one of 1."""
    return learned.cost.of(size) / learned.cost.of(1)


def test_without_steps_it_is_the_curve_and_any_step_sets_the_scale() -> None:
    cost = fresh()
    assert cost.cost.of(1) == 1.0 and cost.cost.of(32) == 2.0
    learned(lambda *_: 0.01, [1, 1], cost)
    assert math.isclose(cost.cost.of(1), 0.01) and math.isclose(cost.cost.of(32), 0.02)


def test_the_proportions_of_a_machine_are_learned_and_sizes_between_follow_their_neighbours() -> None:
    cost = learned(lambda slots, _: 0.01 * slots, [1, 16] * 80, fresh())
    assert math.isclose(proportion(cost, 16), 16, rel_tol=0.1)
    assert math.isclose(cost.cost.of(1), 0.01, rel_tol=0.1)
    assert 0.01 < cost.cost.of(4) < 0.16
    assert proportion(cost, 8) > 1.5 * fresh().cost.of(8)


def test_one_disturbed_step_changes_little() -> None:
    cost = learned(lambda _, n: 5.0 if n == 21 else 0.01, [1, 8] * 11 + [1], fresh((1, 1.0)))
    assert 1 < proportion(cost, 8) < 1.35


def test_a_slow_minute_changes_no_proportion() -> None:
    cost = learned(lambda *_: 0.01, [1, 8, 8, 4] * 20, fresh((1, 1.0)))
    learned(lambda _, n: 0.01 if n < 3 else 0.05, [8] * 100 + [1, 8] * 100, cost)
    assert math.isclose(proportion(cost, 8), 1, rel_tol=0.02)


def test_a_size_that_was_measured_too_slow_is_corrected_by_its_next_steps_or_fades() -> None:
    def wrong() -> LearnedCost:
        cost = learned(lambda slots, _: 0.05 if slots == 8 else 0.01, [1, 8] * 40, fresh((1, 1.0)))
        assert proportion(cost, 8) > 4
        return cost

    assert proportion(learned(lambda *_: 0.01, [1, 8] * 30, wrong()), 8) < 1.15
    assert proportion(learned(lambda *_: 0.01, [1] * 3000, wrong()), 8) < 1.25


def test_a_clock_that_stands_still_is_survived() -> None:
    assert learned(lambda *_: 0.0, [1, 1, 4, 4], fresh()).cost.of(4) > 0


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16", "int8", "int4", "w8a8", "w4a8"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_precision_has_a_curve_that_rises(precision: str, device: str) -> None:
    cost = built_in(precision, device)
    assert 0 < cost.of(1) < cost.of(16) < 16 * cost.of(1)


def test_a_session_learns_from_the_steps_that_run_and_writes_nothing(
    tmp_path: Path, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LearnedCost, "record", RECORD)
    opened = sessions("llama")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    session = Session(opened.bundle, opened.variant, opened.backend, opened.text)
    session.generate([5, 6], GenerationConfig(tau=1.0, max_new_tokens=40))
    assert session.cost.of(1) < 0.5, "in seconds of this machine; the curve of the tests says 1"
    assert not list(tmp_path.iterdir())
    session.cost = Cost(((1, 5.0),))
    session.generate([5, 6], GenerationConfig(tau=1.0, max_new_tokens=40))
    assert session.cost == Cost(((1, 5.0),))


def test_no_step_runs_but_those_of_the_answer(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = sessions("llama")
    session, steps = Session(opened.bundle, opened.variant, opened.backend, opened.text), []
    real = opened.backend.step
    monkeypatch.setattr(opened.backend, "step", lambda *a: steps.append(1) or real(*a))
    Batcher(session).close()
    assert not steps
    stats = session.generate([5, 6], GenerationConfig(tau=0.3, max_new_tokens=6)).stats
    assert len(steps) == stats.forwards + stats.prefill_forwards
