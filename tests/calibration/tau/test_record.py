"""The record pass and what is foretold from it: exact as long as a decode keeps to the one-token answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import pytest
from support.fixtures import Sessions

from mars_export import GenerationConfig, Session
from mars_export.calibration.journal import restore
from mars_export.calibration.tasks.tasks import Message, Task
from mars_export.calibration.tau.decoding import decode_rows
from mars_export.calibration.tau.options import ONE_TOKEN, setting
from mars_export.calibration.tau.record import Trace, record, recorded_metrics
from mars_export.calibration.tau.replay import predict, replay

WORDS = ("hello", "the cat", "one two three", "in the end", "an apple", "er")
TAUS = {
    "probability": (0.99, 0.9, 0.7, 0.4, 0.1, 0.0),
    "margin": (0.9, 0.3, 0.0),
    "entropy": (0.01, 1.0, 3.0, 9.0),
}


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    return [Task((Message("user", word),), "agreement", None, 6 + 7 * i) for i, word in enumerate(WORDS)]


@pytest.fixture(scope="module")
def session(sessions: Sessions) -> Session:
    return sessions("qwen2")


@pytest.fixture(scope="module")
def traces(session: Session, tasks: Sequence[Task]) -> list[Trace]:
    return list(record(session, tasks, 4))


def decoded(
    session: Session, tasks: Sequence[Task], config: GenerationConfig
) -> list[tuple[tuple[int, ...], int]]:
    return [(o.token_ids, o.forwards) for o in decode_rows(session, tasks, config, 3)]


def test_the_recorded_answer_is_the_one_token_answer(
    session: Session, tasks: Sequence[Task], traces: Sequence[Trace]
) -> None:
    plain = decoded(session, tasks, ONE_TOKEN)
    assert [(t.outcome.token_ids, t.outcome.forwards) for t in traces] == plain
    assert [t.outcome.text for t in traces] == [o.text for o in decode_rows(session, tasks, ONE_TOKEN, 1)]


def test_every_step_predicts_a_full_window_within_the_limit(
    session: Session, tasks: Sequence[Task], traces: Sequence[Trace]
) -> None:
    block = session.bundle.manifest.block
    for task, trace in zip(tasks, traces, strict=True):
        wanted = [min(block, task.max_new_tokens - i) for i in range(len(trace.outcome.token_ids))]
        assert [len(step) for step in trace.predicted] == wanted
        for steps in trace.confidences.values():
            assert [len(step) for step in steps] == wanted
        assert tuple(step[0] for step in trace.predicted) == trace.outcome.token_ids


def test_batches_change_nothing(session: Session, tasks: Sequence[Task], traces: Sequence[Trace]) -> None:
    alone = list(record(session, tasks, 1))
    assert [t.predicted for t in alone] == [t.predicted for t in traces]


@pytest.mark.parametrize(("metric", "tau"), [(metric, tau) for metric, taus in TAUS.items() for tau in taus])
def test_a_walk_is_the_real_decode_until_the_answers_part(
    session: Session, tasks: Sequence[Task], traces: Sequence[Trace], metric: str, tau: float
) -> None:
    eos = session.bundle.manifest.tokens.eos
    real = decoded(session, tasks, setting(tau, metric))
    for task, trace, (token_ids, forwards) in zip(tasks, traces, real, strict=True):
        walked = replay(trace, metric, tau, eos, task.max_new_tokens)
        assert walked.agrees == (token_ids == trace.outcome.token_ids)
        if walked.agrees:
            assert (walked.tokens, walked.forwards) == (len(token_ids), forwards)


def test_all_rows_at_once(session: Session, tasks: Sequence[Task], traces: Sequence[Trace]) -> None:
    limits, eos = [t.max_new_tokens for t in tasks], session.bundle.manifest.tokens.eos
    one = predict(traces, limits, "probability", 1.0, eos)
    assert (one.tokens_per_forward, one.agreement) == (1.0, 1.0)
    speeds = [
        predict(traces, limits, "probability", tau, eos).tokens_per_forward for tau in TAUS["probability"]
    ]
    assert speeds == sorted(speeds)
    assert speeds[-1] > 3


def test_a_trace_survives_json(traces: Sequence[Trace]) -> None:
    assert [restore(Trace, json.loads(json.dumps(asdict(t)))) for t in traces] == list(traces)


def test_only_what_the_graph_puts_out_is_recorded(session: Session) -> None:
    assert recorded_metrics(session) == ("probability", "margin", "entropy")
