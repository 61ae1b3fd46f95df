"""Rows served on a fake device: the time of each event, and what a reader waits for."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake import FakeBackend
from support.fake_session import fake_session, predict
from support.laps import task

from mars_export import SessionError, Stats
from mars_export.calibration.bench.laps import Timeline, serve
from mars_export.calibration.bench.settings import Setting
from mars_export.calibration.tasks.scores import Output
from mars_export.runtime.decode.backend import StepOutput


def test_what_a_reader_waits_for() -> None:
    stats = Stats(forwards=2, proposed=5, verified=3)
    made = Timeline.of(Output("a b c d", (1, 2, 3, 4)), stats, "length", 10.0, [10.5, 10.8])
    assert (made.ttft, made.gaps) == (0.5, (pytest.approx(0.3),))
    assert made.seconds == pytest.approx(0.8)
    assert made.tpot == pytest.approx(0.1), "the time after the first event over all tokens but the first"
    assert Timeline.of(Output("", (7,)), Stats(forwards=1), "eos", 1.0, [1.25]).tpot is None
    assert Timeline.of(Output(""), Stats(), "capacity", 1.0, []).ttft is None


@pytest.mark.parametrize(
    "setting",
    [
        Setting(1),
        Setting(3),
        Setting(3, 0.5),
        Setting(3, 0.5, 2),
        Setting(3, None, "full"),
    ],
)
def test_rows_are_served_with_the_time_of_each_event(setting: Setting) -> None:
    tasks = [task("a" * n, limit=3 + n) for n in range(1, 8)]
    backend = FakeBackend(predict)
    lap = serve(fake_session(backend), tasks, setting)
    assert [a.num_tokens for a in lap.answers] == [t.max_new_tokens for t in tasks], (
        "each in its place, whoever came first"
    )
    assert lap.tokens == sum(t.max_new_tokens for t in tasks)
    for answer in lap.answers:
        assert answer.output.text.split() == [str(token) for token in answer.output.token_ids]
        assert answer.ttft is not None and 0 <= answer.ttft <= lap.seconds
        assert answer.ttft + sum(answer.gaps) <= lap.seconds + 1e-3
        assert len(answer.gaps) < answer.stats.forwards
        assert answer.finish_reason == "length"
    if setting.one_token:
        assert all(a.stats.forwards == a.num_tokens == len(a.gaps) + 1 for a in lap.answers)
    assert max(step.rows for step in backend.steps) <= setting.batch


def test_a_failing_device_fails_the_lap_and_leaves_no_thread_waiting() -> None:
    class Broken(FakeBackend):
        def step(self, *_: Any) -> StepOutput:
            raise SessionError("the device is on fire")

    with pytest.raises(SessionError, match="on fire"):
        serve(fake_session(Broken(predict)), [task("a" * n) for n in range(1, 30)], Setting(2))
