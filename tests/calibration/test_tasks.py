"""Task files and the scores that judge answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mars_export import CalibrationError
from mars_export.calibration.tasks.scores import SCORES, Output, own
from mars_export.calibration.tasks.tasks import builtin_names, data_hash, find, load

GOOD: dict[str, Any] = {
    "messages": [{"role": "user", "content": "2 + 2"}],
    "answer": "4",
    "score": "exact_match",
    "max_new_tokens": 8,
}


def written(path: Path, *rows: Any) -> Path:
    file = path / "tasks.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def test_good_rows(tmp_path: Path) -> None:
    (task,) = load(written(tmp_path, GOOD))
    assert task.prompt == GOOD["messages"]
    assert task.score(Output(" 4\n")) == 1
    assert task.score(Output("5")) == 0


def test_agreement_needs_no_answer(tmp_path: Path) -> None:
    (task,) = load(written(tmp_path, GOOD | {"answer": None, "score": "agreement"}))
    assert task.score(Output("x"), Output("x")) == 1
    with pytest.raises(CalibrationError, match="run tau 1 first"):
        task.score(Output("x"))


def test_a_text_is_continued_as_it_stands(tmp_path: Path) -> None:
    (task,) = load(written(tmp_path, {"prompt": "2 + 2 =\u2028", "answer": "4", "score": "contains"}))
    assert task.prompt == "2 + 2 =\u2028"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{broken", "line 2"),
        ("[]", "line 2"),
        (GOOD | {"score": "luck"}, "exact_match"),
        ({k: v for k, v in GOOD.items() if k != "messages"}, "messages"),
        (GOOD | {"answer": None}, "answer"),
        (GOOD | {"max_new_tokens": 0}, "max_new_tokens"),
        (GOOD | {"messages": [{"role": "user"}]}, "line 2"),
        (GOOD | {"prompt": "x"}, "exclude each other"),
        ({"prompt": "", "answer": "x"}, "'prompt' must be a non-empty string"),
        ({"prompt": 7}, "'prompt' must be a non-empty string"),
        (GOOD | {"score": "regex", "answer": "("}, "not a regular expression"),
        (GOOD | {"score": "os:system"}, "must be named with --score"),
        (GOOD | {"score": ["exact_match"]}, "unknown score"),
        (GOOD | {"answer": "\ud800"}, "a lone surrogate is not text"),
        (GOOD | {"note": 1}, "unknown field 'note'"),
        ("[" * 100_000, "line 2: nested too deep"),
        ('{"max_new_tokens": ' + "9" * 5000 + "}", "line 2: it has a number"),
    ],
)
def test_bad_rows_are_named_by_line(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        load(written(tmp_path, GOOD, row))


def test_all_bad_lines_are_listed_at_once(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"(?s)line 1.*line 3"):
        load(written(tmp_path, "{", GOOD, "}"))


@pytest.mark.parametrize("content", ["", "\n\n", None], ids=["empty", "blank", "missing"])
def test_a_file_without_rows_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tasks.jsonl").write_text(content)
    with pytest.raises(CalibrationError, match=r"tasks\.jsonl"):
        load(tmp_path / "tasks.jsonl")


def test_many_bad_lines_are_not_all_printed(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="and 30 more"):
        load(written(tmp_path, *["{"] * 50))


@pytest.mark.parametrize(
    ("score_name", "output", "answer", "score"),
    [
        ("final_number", "5 + 3 = 8. #### 8", "#### 8", 1),
        ("final_number", "first #### 7, no: #### 8", "#### 8", 1),
        ("final_number", "the answer is 1,200.", "#### 1200", 1),
        ("final_number", "no number", "#### 8", 0),
        ("final_number", "#### -3", "#### 3", 0),
        ("final_number", "9" * 400, "9" * 400, 0),
        ("json_equal", '{"b": 1, "a": 2}', '{"a": 2, "b": 1}', 1),
        ("json_equal", '{"b": [{"y": 1.0, "x": 2}]}', '{"b": [{"x": 2, "y": 1}]}', 1),
        ("json_equal", "[1, 2]", "[2, 1]", 0),
        ("json_equal", "true", "1", 0),
        ("json_equal", "{", "{}", 0),
        ("json_equal", "[" * 100_000, "[]", 0),
        ("json_valid", ' {"a": 1} ', "", 1),
        ("json_valid", '{"a": 1} and so on', "", 0),
        ("normalized_match", "The  Answer: forty-two.", "the answer forty two", 1),
        ("normalized_match", "forty three", "forty two", 0),
        ("contains", "it is 42, I think", "42", 1),
        ("contains", "it is 4 2", "42", 0),
        ("regex", "on Monday 3 May", r"\d+ (May|June)", 1),
        ("regex", "in May", r"\d+ May", 0),
        ("agreement", "a ", "a", 0),
    ],
)
def test_scores(score_name: str, output: str, answer: str, score: float) -> None:
    assert SCORES[score_name].judge(Output(output), Output(answer)) == score


@pytest.mark.parametrize(
    ("one", "other", "score"),
    [
        ((1, 2, 3, 4), (1, 2, 3, 4), 1),
        ((1, 2, 3, 4), (1, 9, 3), 0.5),
        ((), (), 1),
        ((), (1, 2), 0),
        ((1, 2), (2, 1), 0),
    ],
)
def test_edit_similarity_counts_tokens(one: tuple[int, ...], other: tuple[int, ...], score: float) -> None:
    assert SCORES["edit_similarity"].judge(Output("", one), Output("", other)) == score


def test_a_users_own_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_scores.py").write_text(
        "def half(output, answer):\n    return 0.5\ndef much(output, answer):\n    return 5\nnumber = 3\n"
        "def wild(output, answer):\n    raise KeyError(output)\n"
    )
    row = {name: value for name, value in GOOD.items() if name != "score"}
    (task,) = load(written(tmp_path, row), score="my_scores:half")
    assert task.score(Output("4")) == 0.5
    with pytest.raises(CalibrationError, match="gave 5; a number from 0 to 1"):
        own("my_scores:much").judge(Output(""), Output(""))
    (wild,) = load(written(tmp_path, row), score="my_scores:wild")
    with pytest.raises(
        CalibrationError, match="row 1: score my_scores:wild raised KeyError: 'x'; called with 'x' and '4'"
    ):
        wild.score(Output("x"))
    for name, message in (
        ("my_scores:none", "no attribute"),
        ("no_such_module_here:f", "No module named"),
        ("my_scores:number", "not a function"),
        ("luck", "known: exact_match"),
    ):
        with pytest.raises(CalibrationError, match=message):
            load(written(tmp_path, row), score=name)


def test_built_in_tasks_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mars_export.calibration.tasks.tasks.DATA", tmp_path)
    written(tmp_path, GOOD).rename(tmp_path / "sums.calibration.jsonl")
    assert builtin_names() == ["sums"]
    assert len(load(find("sums"))) == 1
    with pytest.raises(CalibrationError, match=r"sum: cannot be read: .*; give a JSONL file or sums"):
        load(find("sum"))


def test_the_data_hash_knows_order_and_content(tmp_path: Path) -> None:
    one, other = load(written(tmp_path, GOOD, GOOD | {"answer": "5"}))
    assert len({data_hash(rows) for rows in ([one, other], [other, one], [one], [one, one])}) == 4
