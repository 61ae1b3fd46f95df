"""The report: changed answers, worst first, and its page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.calibrations import OPTIONS, WORDS, by_order, rows

from mars_export.calibration.tasks.scores import SCORES
from mars_export.calibration.tasks.tasks import TaskRow
from mars_export.calibration.tau import race
from mars_export.calibration.tau.calibrate import Change, changes_of
from mars_export.calibration.tau.decoding import Outcome
from mars_export.calibration.tau.report import markdown
from mars_export.calibration.tau.run import CalibrationRequest, run


def test_changed_answers_are_listed_worst_first(
    request_for: Callable[..., CalibrationRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "race", by_order)
    (tmp_path / "words.jsonl").write_text(rows().replace('"hello"', '"hello <b> ``` | x"'))
    made = run(request_for(options=replace(OPTIONS, taus=(0.0,))))
    changes = made.calibration.changed
    assert made.calibration.chosen is not None
    assert len(changes) == made.num_changed > 2
    assert {c.row for c in changes} <= set(range(1, len(WORDS) + 1))
    page = (tmp_path / "out" / "report.md").read_text()
    listed = [int(n) for n in re.findall(r"\*\*Row (\d+)\*\*", page)]
    assert listed == [c.row for c in changes[:10]]
    assert f"{len(changes)} of {len(WORDS)} answers are not those of one-token mode" in page


def test_the_worst_change_lost_most_and_then_changed_most() -> None:
    def outcome(*ids: int) -> Outcome:
        return Outcome(" ".join(map(str, ids)), ids, 1, "eos")

    cases = [  # row, before, after, answer
        (1, (1, 2, 3), (1, 2, 3), "1 2 3"),
        (2, (1, 2, 3), (1, 2, 4), "1 2 4"),  # gained
        (3, (1, 2, 3), (1, 2, 4), "x"),
        (4, (1, 2, 3), (7, 8, 9), "x"),
        (5, (1, 2, 3), (1, 2, 4), "1 2 3"),  # lost
    ]
    tasks = [TaskRow("p", SCORES["exact_match"], answer, 8, number=n) for n, *_, answer in cases]
    before, after = [outcome(*b) for _, b, *_ in cases], [outcome(*a) for *_, a, _ in cases]
    found = changes_of(tasks, before, after)
    assert [c.row for c in found] == [5, 4, 3, 2]
    assert found[0] == Change(5, "p", "1 2 3", "1 2 4", 1.0, 0.0)


def test_a_busy_machine_is_reported(request_for: Callable[..., CalibrationRequest]) -> None:
    made = run(request_for())
    quiet, busy = replace(made, load=0.0), replace(made, load=1e6)
    [note] = set(busy.facts) - set(quiet.facts)
    assert note[0] == "note" and "the machine was busy" in note[1]
    assert note[1] in markdown(busy) and note[1] not in markdown(quiet)


def test_the_report_folder(request_for: Callable[..., CalibrationRequest], tmp_path: Path) -> None:
    (tmp_path / "words.jsonl").write_text(rows().replace("hello", "<script>alert(1)</script> | & more"))
    made = run(request_for())
    assert json.loads((tmp_path / "out" / "report.json").read_text())["task"] == "words.jsonl"
    result = made.headline.partition(": ")[2]
    text = (tmp_path / "out" / "report.md").read_text()
    assert result[1:] in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(made.table)
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1, "every line has all the columns"
    assert "<script" not in re.sub(r"(?s)```text.*?```", "", text)
