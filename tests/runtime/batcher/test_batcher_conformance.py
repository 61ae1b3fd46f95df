"""batcher.json: rows that come and go, step by step. libmars reads the same file."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake import MASK, FakeBackend
from support.loops import NoText, outcomes
from support.makers import cases, maker

from mars_export.runtime.decode.config import GenerationConfig
from mars_export.runtime.decode.limits import Limits
from mars_export.runtime.decode.schedule import Schedule
from mars_export.runtime.decode.sequence import Sequence

CASES, LOOPS = cases("batcher.json"), maker("make_loops")


def row_of(index: int, wanted: dict[str, Any]) -> Sequence:
    config = GenerationConfig(
        tau=wanted["tau"],
        masks=wanted["masks"],
        max_new_tokens=wanted["max_new_tokens"],
        eos_ids=tuple(wanted["eos_ids"]),
    )
    stream = NoText(lambda token: token == wanted["stop_token"])
    seq = Sequence(index, wanted["prompt"], config, (), stream)
    seq.client = wanted["client"]
    return seq


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_every_row_gets_its_tokens_in_the_step_that_is_written(case: dict[str, Any]) -> None:
    backend = FakeBackend(lambda known, masks: LOOPS.predict(list(known), masks))
    limits = Limits(
        case["max_rows"],
        prefill_tokens=case["prefill_tokens"],
        max_rows_per_client=case["max_rows_per_client"],
    )
    schedule = Schedule(backend, case["block"], MASK, limits)
    rows = [row_of(i, wanted) for i, wanted in enumerate(case["rows"])]
    commits: list[list[list[Any]]] = [[] for _ in rows]
    for step in range(case["steps"]):
        for row, wanted in zip(rows, case["rows"], strict=True):
            if wanted["arrives"] == step:
                schedule.add(row)
            if wanted["cancelled"] == step and row.finish_reason is None:
                row.finish_reason = "cancelled"
        for event in outcomes(schedule):
            assert event.error is None
            commits[event.seq].append([step, list(event.token_ids)])
    assert schedule.is_idle
    for row, seen, wanted in zip(rows, commits, case["rows"], strict=True):
        assert seen == wanted["expected"]["commits"]
        assert row.finish_reason == wanted["expected"]["finish_reason"]
