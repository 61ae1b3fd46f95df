"""Rows decoded at a tau, and what the default checkpoint's evaluation counts of them: on a session without a
model, and once on a tiny bundle."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.paths import ROOT
from support.tiny import Named

from mars_export import CalibrationError, Completion, GenerationConfig, Session, Stats
from mars_export.calibration.tasks.scores import SCORES, Output
from mars_export.calibration.tasks.tasks import TaskRow


@pytest.fixture(scope="module")
def evaluate() -> ModuleType:
    path = ROOT / "examples" / "default-checkpoint" / "evaluate.py"
    spec = importlib.util.spec_from_file_location("evaluate", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Scripted:
    """Answers "slow" at tau 1 and "fast" below, with twice the tokens per forward."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []  # rows, and how many at a time
        self.limits: list[int] = []

    def generate_each(
        self, prompts: Sequence[object], config: Sequence[GenerationConfig], *, batch: int
    ) -> Iterator[Completion]:
        self.calls.append((len(prompts), batch))
        self.limits += [c.max_new_tokens for c in config]
        return map(self.answer, config)

    def answer(self, config: GenerationConfig) -> Completion:
        stats = Stats(tokens=8, forwards=8 if config.one_token else 4, decode_time=2.0, tokens_after_first=6)
        return Completion("slow" if config.one_token else "fast", (1,) * 8, (1.0,) * 8, "eos", stats)


def tasks(score: str, answer: str | None, count: int = 5) -> list[TaskRow]:
    return [TaskRow([{"role": "user", "content": "hello"}], SCORES[score], answer, 8) for _ in range(count)]


def point(
    evaluate: ModuleType, session: Any, rows: list[TaskRow], tau: float | None, **others: Any
) -> tuple[Any, list[str]]:
    given = {"references": None, "batch": 1, "tell": lambda done, total: None} | others
    return evaluate.point(session, rows, tau, **given)


def test_one_row_at_a_time_is_timed_without_the_prompt(evaluate: ModuleType) -> None:
    session = Scripted()
    made, _ = point(evaluate, session, tasks("exact_match", "slow"), 1.0)
    assert (made["tokens_timed"], made["seconds"]) == (5 * 6, 5 * 2.0)
    assert session.limits == [8] * 5
    many, _ = point(evaluate, session, tasks("exact_match", "slow"), 0.9, batch=2)
    assert (many["tokens_timed"], many["tokens"]) == (5 * 8, 5 * 8)
    assert session.calls == [(5, 1), (5, 2)]


def test_counts(evaluate: ModuleType) -> None:
    session = Scripted()
    made, outputs = point(
        evaluate, session, tasks("exact_match", "fast"), 0.9, references=["slow"] * 5, batch=2
    )
    assert session.calls == [(5, 2)]
    assert (made["accuracy"], made["tokens_per_forward"], made["agreement"]) == (1.0, 2.0, 0.0)
    assert outputs == ["fast"] * 5
    made, _ = point(evaluate, session, tasks("exact_match", "slow"), 1.0)
    assert (made["tokens_per_second"], made["agreement"]) == (pytest.approx(3.0), 1.0)


def test_agreement_is_with_the_one_token_outputs(evaluate: ModuleType) -> None:
    rows = tasks("agreement", None)
    first, outputs = point(evaluate, Scripted(), rows, 1.0)
    second, _ = point(evaluate, Scripted(), rows, 0.9, references=outputs)
    assert [p["accuracy"] for p in (first, second)] == [p["agreement"] for p in (first, second)] == [1.0, 0.0]
    with pytest.raises(ValueError, match="shorter"):
        point(evaluate, Scripted(), rows, 0.9, references=["x"])
    with pytest.raises(CalibrationError, match="run tau 1 first"):
        rows[0].score(Output("x"))


def test_on_a_real_session(evaluate: ModuleType, sessions: Callable[[str], Session]) -> None:
    rows = tasks("agreement", None, 3)
    one, outputs = point(evaluate, sessions("qwen2"), rows, 1.0, batch=3)
    fast, _ = point(evaluate, sessions("qwen2"), rows, 0.3, references=outputs, batch=3)
    exact, same = point(evaluate, sessions("qwen2"), rows, None, references=outputs, batch=3)
    assert (exact["agreement"], exact["accuracy"], same) == (1.0, 1.0, outputs)
    assert exact["tokens"] == one["tokens"] and 0 < exact["forwards"] <= one["forwards"]
    assert one["tokens_per_forward"] == 1.0
    assert fast["tokens_per_forward"] > 1.0


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
