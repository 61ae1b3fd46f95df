"""Task files and the metrics that judge answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mars_export.calibration.tasks import METRICS, load
from mars_export.runtime import CalibrationError

GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "2 + 2"}], "answer": "4", "metric": "exact_match", "max_new_tokens": 8}


def written(path: Path, *rows: Any) -> Path:
    file = path / "tasks.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def test_good_rows(tmp_path: Path) -> None:
    (task,) = load(written(tmp_path, GOOD))
    assert task.prompt == GOOD["messages"]
    assert task.is_right(" 4\n")
    assert not task.is_right("5")


def test_agreement_needs_no_answer(tmp_path: Path) -> None:
    (task,) = load(written(tmp_path, GOOD | {"answer": None, "metric": "agreement"}))
    assert task.is_right("x", "x")
    with pytest.raises(CalibrationError, match="run tau 1 first"):
        task.is_right("x")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{broken", "line 2"),
        ("[]", "line 2"),
        (GOOD | {"metric": "luck"}, "exact_match"),
        ({k: v for k, v in GOOD.items() if k != "messages"}, "messages"),
        (GOOD | {"answer": None}, "answer"),
        (GOOD | {"max_new_tokens": 0}, "max_new_tokens"),
        (GOOD | {"messages": [{"role": "user"}]}, "line 2"),
    ],
)
def test_bad_rows_are_named_by_line(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        load(written(tmp_path, GOOD, row))


def test_all_bad_lines_are_listed_at_once(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"(?s)line 1.*line 3"):
        load(written(tmp_path, "{", GOOD, "}"))


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_empty_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(content)
    with pytest.raises(CalibrationError):
        load(tmp_path / "tasks.jsonl")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"tasks\.jsonl"):
        load(tmp_path / "tasks.jsonl")


@pytest.mark.parametrize(
    ("metric", "output", "answer", "right"),
    [
        ("final_number", "5 + 3 = 8. #### 8", "#### 8", True),
        ("final_number", "first #### 7, no: #### 8", "#### 8", True),
        ("final_number", "the answer is 1,200.", "#### 1200", True),
        ("final_number", "no number", "#### 8", False),
        ("final_number", "#### -3", "#### 3", False),
        ("json_equal", '{"b": 1, "a": 2}', '{"a": 2, "b": 1}', True),
        ("json_equal", "[1, 2]", "[2, 1]", False),
        ("json_equal", "{", "{}", False),
        ("agreement", "a ", "a", False),
    ],
)
def test_metrics(metric: str, output: str, answer: str, right: bool) -> None:
    assert METRICS[metric](output, answer) is right
