"""Rows served: the time of each event, and what a reader waits for."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import pytest
from support.calibrations import task
from support.fake import Recording
from support.fixtures import Sessions

from mars_export import Session, SessionError, Stats
from mars_export.calibration.laps import Timeline, serve
from mars_export.calibration.options import Setting
from mars_export.calibration.tasks.scores import Output
from mars_export.runtime.decode.backend import StepOutput


def test_what_a_reader_waits_for() -> None:
    stats = Stats(forwards=2, draft_tokens=5, accepted_draft_tokens=3)
    made = Timeline.of(Output("a b c d", (1, 2, 3, 4)), stats, "length", 10.0, [10.5, 10.8])
    assert (made.ttft, made.gaps) == (0.5, (pytest.approx(0.3),))
    assert made.seconds == pytest.approx(0.8)
    assert made.tpot == pytest.approx(0.1), "the time after the first event over all tokens but the first"
    assert Timeline.of(Output("", (7,)), Stats(forwards=1), "eos", 1.0, [1.25]).tpot is None
    assert Timeline.of(Output(""), Stats(), "capacity", 1.0, []).ttft is None


@pytest.mark.parametrize(
    "setting", [Setting(1), Setting(3), Setting(3, 0.5), Setting(3, 0.5, 2), Setting(3, None, "full")]
)
def test_rows_are_served_with_the_time_of_each_event(setting: Setting, sessions: Sessions) -> None:
    plain = sessions("qwen2")
    backend = Recording(plain.backend)
    tasks = [task("a" * n, limit=3 + n) for n in range(1, 8)]
    start = perf_counter()
    answers = serve(Session(plain.bundle, plain.variant, backend, plain.text), tasks, setting)
    seconds = perf_counter() - start
    for asked, answer in zip(tasks, answers, strict=True):
        if setting.tau in (1, None):  # each in its place, whoever came first
            alone = plain.generate(asked.source, asked.config(Setting(1).config(1)))
            assert answer.output == Output(alone.text, alone.token_ids)
        assert answer.finish_reason == "eos" or answer.num_tokens == asked.max_new_tokens
        assert answer.ttft is not None and 0 <= answer.ttft <= seconds
        assert answer.ttft + sum(answer.gaps) <= seconds + 1e-3
        assert len(answer.gaps) < answer.stats.forwards
    if setting.one_token:
        assert all(a.stats.forwards == a.num_tokens == len(a.gaps) + 1 for a in answers)
    assert max(step.rows for step in backend.steps) <= setting.batch


def test_a_failing_device_fails_the_lap_and_leaves_no_thread_waiting(sessions: Sessions) -> None:
    class Broken(Recording):
        def step(self, *_: Any) -> StepOutput:
            raise SessionError("the device is on fire")

    plain = sessions("qwen2")
    session = Session(plain.bundle, plain.variant, Broken(plain.backend), plain.text)
    with pytest.raises(SessionError, match="on fire"):
        serve(session, [task("a" * n) for n in range(1, 30)], Setting(2))
