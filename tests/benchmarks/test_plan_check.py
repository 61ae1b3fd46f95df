"""benchmarks/plan_check.py on a tiny bundle: the same requests at the same times, planned and asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.missing import need
from support.tiny import Named

import plan_check


def test_planned_and_asked(bundles: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("uvicorn", "serve")
    monkeypatch.chdir(tmp_path)
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
