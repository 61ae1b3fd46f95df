"""The state file: what was finished is found again, whatever cut it short; other work's state is never
used."""

from __future__ import annotations

from pathlib import Path

import pytest

from mars_export import CalibrationError
from mars_export.calibration.journal import Journal

WORK = {"graph": "abc", "batch": 1}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "new" / "state.jsonl"
    journal = Journal.open(path, WORK, resume=False, force=False)
    journal["one"] = {"text": "é\u2028\ud800"}
    journal["two"] = [1, 2]
    journal.close()
    return path


def test_values_are_there_after_reopening(file: Path) -> None:
    journal = Journal.open(file, WORK, resume=True, force=False)
    assert journal["one"] == {"text": "é\u2028\ud800"}
    assert "two" in journal
    assert "three" not in journal
    journal["three"] = 3
    journal.close()
    assert Journal.open(file, WORK, resume=True, force=False)["three"] == 3


def test_a_line_cut_short_at_any_byte_loses_only_itself(file: Path) -> None:
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    for end in range(len(whole)):
        file.write_bytes(whole[:end])
        journal = Journal.open(file, WORK, resume=True, force=False)
        kept = sum(end >= sum(map(len, lines[: n + 1])) for n in range(len(lines)))
        assert [key for key in ("one", "two") if key in journal] == ["one", "two"][: max(0, kept - 1)]
        journal["two"] = [1, 2]
        journal.close()
        assert Journal.open(file, WORK, resume=True, force=False)["two"] == [1, 2]


def test_a_state_is_not_used_unasked(file: Path) -> None:
    with pytest.raises(
        CalibrationError, match="an earlier run left 2 results here; --resume continues it, --force"
    ):
        Journal.open(file, WORK, resume=False, force=False)
    assert "one" not in Journal.open(file, WORK, resume=False, force=True)


def test_a_state_of_other_work_is_never_used(file: Path) -> None:
    for resume in (True, False):
        with pytest.raises(CalibrationError, match=r"this is the state of a run with another batch, graph"):
            Journal.open(file, {"graph": "xyz", "batch": 2}, resume=resume, force=False)


@pytest.mark.parametrize("line", [b"{broken\n", b'["only a key"]\n', b"7\n", b"\xff\xff\n"])
def test_a_damaged_line_is_named(file: Path, line: bytes) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[0], line, *lines[1:]]))
    with pytest.raises(CalibrationError, match="line 2 is damaged .*--force starts over"):
        Journal.open(file, WORK, resume=True, force=False)


def test_something_else_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("dear diary\n")
    with pytest.raises(CalibrationError, match="line 1 is damaged"):
        Journal.open(tmp_path / "notes", WORK, resume=True, force=False)
