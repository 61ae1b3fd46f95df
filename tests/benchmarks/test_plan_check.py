"""benchmarks/plan_check.py on a tiny bundle: the same requests at the same times, planned and asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.missing import need
from support.tiny import Named

import plan_check
from mars_export.calibration.plan.fleet import Fleet, Machine
from mars_export.calibration.plan.work import Mode, Work
from mars_export.runtime.decode.cost import Cost
from mars_export.runtime.machine import CACHE_VARIABLE


def test_planned_and_asked(bundles: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("uvicorn", "serve")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))  # the program sets its own, for itself and its servers
    row = {"answer": "", "score": "contains", "max_new_tokens": 6}
    lines = [{"messages": [{"role": "user", "content": word}], **row} for word in ("hello", "one", "er")]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = (
        "--task words.jsonl --replicas 2 --threads 1 --batch 2 --multiples 0.05 --seconds 0.001 --least 12"
    )
    plan_check.main([str(bundles("qwen2")), *words.split(), "--json", "out.json"])
    value = json.loads((tmp_path / "out.json").read_text())
    assert value["replicas"] == 2
    (made,) = value["rows"]
    assert (made["requests"], made["lost"], made["failed"]) == (12, 0, {})
    assert 0 < made["p50_plan"] <= made["p95_plan"]
    assert 0 < made["p50_real"] <= made["p95_real"]
    assert 0 < made["busy_plan"] < 1 and 0 < made["busy_real"] < 1
    for name in ("alone", "beside"):
        assert value[name]["slower"] >= 1 and value[name]["cost"][-1][0] > 100


def test_steps_cost_as_much_as_the_others_are_busy() -> None:
    def fleet(seconds: float) -> Fleet:
        machine = Machine(Cost(((1, seconds), (64, 3 * seconds))), 4, 2, slower=1.5)
        return Fleet(machine, Mode("one-token", False), [Work(4, (1, 1, 1), 3)])

    alone, beside = fleet(0.01), fleet(0.02)
    for positions in (1, 20, 64):
        for busy, seconds in ((0.0, 1.0), (0.5, 1.5), (1.0, 2.0)):
            found = plan_check.cost(plan_check.between(alone, beside, busy), positions)
            assert found == pytest.approx(seconds * plan_check.cost(alone, positions))
    # Requests that never meet are read at the price of an idle neighbour, those that always do at the other.
    far = plan_check.planned(alone, beside, 2, [0.0, 50.0], [0, 0])
    near = plan_check.planned(alone, beside, 2, [0.0] * 400, [0] * 400)
    assert far.p95 == pytest.approx(alone.run([0.0], [0], 1).p95, rel=0.01)
    assert near.seconds == pytest.approx(beside.run([0.0] * 400, [0] * 400, 2, "turns").seconds, rel=0.01)
