"""What a step costs, on a fake device and made-up numbers: sweeps over shapes, ratios, break-even."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_session import Blind, fake_session, predict

from mars_export import CalibrationError
from mars_export.calibration.bench.steps import CostCurve, StepTimer, curves, shape_key
from mars_export.calibration.rounds import Rounds


def curve(relative: Sequence[float], slots: Sequence[int] = (1, 4, 8, 15)) -> CostCurve:
    points = tuple(Rounds(r, r, r) for r in relative)
    return CostCurve(1, tuple(slots), points, points)


def test_break_even_is_where_a_step_costs_what_it_yields() -> None:
    assert curve([1, 1, 1, 1]).break_even(8) == 1.0, "free slots: any gain is a gain"
    assert curve([1, 1, 2, 2]).break_even(8) == 2.0
    rising = curve([1, 4, 8, 15])
    assert rising.break_even(8) is None, "slots that cost what they are worth cannot pay"
    assert rising.break_even(1) == 1.0
    k = curve([1, 1.3, 1.7, 2.4]).break_even(8)
    assert k is not None
    assert k == pytest.approx(curve([1, 1.3, 1.7, 2.4]).cost(k + 7), abs=0.01)
    assert curve([1, 1.5, 2, 3]).cost(6) == 1.75


def test_ratios_are_taken_within_a_sweep() -> None:
    sweeps = [{"1x1": 10.0, "1x4": 20.0}, {"1x1": 100.0, "1x4": 200.0}, {"1x1": 30.0, "1x4": 63.0}]
    (made,) = curves(sweeps, (1,), (1, 4))
    assert made.milliseconds[1] == Rounds(63.0, 20.0, 200.0)
    assert made.relative == (Rounds(1.0, 1.0, 1.0), Rounds(2.0, 2.0, pytest.approx(2.1)))
    assert made.to_dict()["points"][1]["slots"] == 4


def test_a_sweep_looks_at_every_shape_at_the_stated_cursor() -> None:
    backend = Blind(predict, max_capacity=100)
    timer = StepTimer(fake_session(backend), (1, 3), 50)
    assert timer.slots == (1, 2, 3, 4, 6, 7)
    sweep = timer.sweep(0)
    assert set(sweep) == {shape_key(b, s) for b in (1, 3) for s in timer.slots}
    assert next(iter(timer.sweep(3))) == "1x4", "each turn begins elsewhere"
    assert {(s.rows, s.slots) for s in backend.steps} == {(b, s) for b in (1, 3) for s in timer.slots}
    assert all(s.kv_length.tolist() == [50] * s.rows for s in backend.steps)
    for s in backend.steps:
        assert s.output_index[0].tolist() == list(range(s.slots)), "as in exact mode"


def test_a_sweep_keeps_within_the_device() -> None:
    timer = StepTimer(fake_session(Blind(predict, max_capacity=20, max_slots=4)), (2,), 256)
    assert timer.slots == (1, 2, 3, 4)
    assert timer.cursor == 16


def test_a_batch_that_memory_does_not_hold() -> None:
    class Full(Blind):
        def new_cache(self, num_rows: int) -> Any:
            def reserve(capacity: int) -> None:
                raise MemoryError(f"{num_rows} rows of {capacity}")

            return SimpleNamespace(reserve=reserve)

    with pytest.raises(CalibrationError, match="a batch of 999 rows of 8 tokens does not fit in memory"):
        StepTimer(fake_session(Full(predict)), (1, 999), 8)
