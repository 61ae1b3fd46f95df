"""Rows decoded at a tau, and what the default checkpoint's evaluation counts of them, on a tiny bundle."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.calibrations import task
from support.paths import ROOT
from support.tiny import Named

from mars_export import Session


@pytest.fixture(scope="module")
def evaluate() -> ModuleType:
    path = ROOT / "examples" / "default-checkpoint" / "evaluate.py"
    spec = importlib.util.spec_from_file_location("evaluate", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_on_a_real_session(evaluate: ModuleType, sessions: Callable[[str], Session]) -> None:
    session, rows = sessions("qwen2"), [task("hello", limit=8)] * 3

    def point(tau: float | None, batch: int = 3, references: Any = None) -> Any:
        return evaluate.point(session, rows, tau, references=references, batch=batch, tell=lambda *_: None)

    one, outputs = point(1.0)
    fast, _ = point(0.3, references=outputs)
    exact, same = point(None, references=outputs)
    assert (exact["agreement"], exact["accuracy"], same) == (1.0, 1.0, outputs)
    assert exact["tokens"] == one["tokens"] and 0 < exact["forwards"] <= one["forwards"]
    assert one["tokens_per_forward"] == 1.0
    assert fast["tokens_per_forward"] > 1.0 and fast["accuracy"] == fast["agreement"]
    alone, _ = point(1.0, batch=1)
    assert alone["tokens_timed"] == alone["tokens"] - 3, "without the prompts and their first tokens"
    assert one["tokens_timed"] == one["tokens"]


def test_the_program_prints_a_table_and_does_nothing_twice(
    evaluate: ModuleType,
    bundles: Named,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(evaluate, "DATA", tmp_path)
    row = {"prompt": "hello", "max_new_tokens": 4}
    (tmp_path / "assistant.test.jsonl").write_text(json.dumps(row) + "\n")
    words = [bundles("qwen2"), "--out", tmp_path / "out.json", "--tasks", "assistant", "--taus", "0.5"]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, words)])
    evaluate.main()
    table = capsys.readouterr().out
    assert (
        table.splitlines()[0]
        == "| task | rows | tau | accuracy | same as tau 1 | tokens/forward | tokens/s |"
    )
    assert [line.split(" | ")[2] for line in table.splitlines()[2:]] == ["1.0", "exact", "0.5"]
    assert "100.0 %" in table.splitlines()[3], "the one-token text"
    points = json.loads((tmp_path / "out.json").read_text())["assistant"]["points"]
    assert points["exact"]["tau"] is None
    assert points["exact"].keys() == points["1.0"].keys()
    monkeypatch.setattr(Session, "generate_each", None)
    evaluate.main()
    assert capsys.readouterr().out == table
