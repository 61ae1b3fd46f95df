"""The order in which a benchmark measures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from support.calibrations import answer, task

from mars_export import Session
from mars_export.calibration import bench as bench_module
from mars_export.calibration.bench import measure
from mars_export.calibration.laps import Timeline
from mars_export.calibration.options import BenchOptions, Setting
from mars_export.calibration.rounds import WARM_TOKENS, interleaved
from mars_export.calibration.tasks.tasks import TaskRow


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Setting, int]]:
    """Laps that take no time; the list says which setting decoded how many rows."""
    order: list[tuple[Setting, int]] = []

    def fake_serve(_: Any, tasks: Sequence[TaskRow], setting: Setting) -> list[Timeline]:
        if tasks[0].max_new_tokens != WARM_TOKENS:
            order.append((setting, len(tasks)))
        return [answer([len(t.shown)], 1) for t in tasks]

    monkeypatch.setattr(bench_module, "serve", fake_serve)
    return order


def test_every_slice_goes_through_all_settings_each_time_from_another_one(
    scripted: list[tuple[Setting, int]],
) -> None:
    options = BenchOptions(taus=(0.9, 0.5), rounds=2, limit=40, exact=False)
    tasks = [task("a" * n) for n in range(40)]
    made = measure(cast(Session, None), tasks, options)
    names = list(options.settings)
    turns = [scripted[i : i + 3] for i in range(0, len(scripted), 3)]
    assert [{name for name, _ in turn} for turn in turns] == [set(names)] * 6
    assert [turn[0][0] for turn in turns] == [names[n % 3] for n in range(6)]
    assert [turn[0][1] for turn in turns] == [16, 16, 8] * 2
    for laps in made.values():
        assert [len(lap.answers) for lap in laps] == [40, 40]
        assert [a.output.token_ids[0] for a in laps[1].answers] == list(range(40)), "rows in their order"
    fifth = list(interleaved(options.settings, 3, 2))[12:15]
    assert fifth == [(1, 1, options.settings[i]) for i in (1, 2, 0)]
