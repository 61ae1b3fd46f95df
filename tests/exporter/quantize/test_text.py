"""The texts that codes are calibrated on, and hostile ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import tiny
from support.calibration_rows import write_rows

from mars_export.exporter.checkpoint.open import Checkpoint
from mars_export.exporter.quantize.text import LONGEST, SEQUENCES, read_text
from mars_export.runtime.errors import ExportError


def test_rows_become_whole_and_cut_sequences(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl")
    text = read_text(path, checkpoint, block=4)
    assert text == read_text(path, checkpoint, block=4)
    assert len(text.sequences) == 36
    for first in range(0, 36, 3):
        whole, *cuts = text.sequences[first : first + 3]
        assert whole[-1] == tiny.IM_END and tiny.MASK not in whole
        answer = len(whole) - whole[::-1].index(tiny.IM_START, 1)  # behind the last turn's opening
        for cut in cuts:
            assert cut[-3:] == (tiny.MASK,) * 3
            assert cut[:-3] == whole[: len(cut) - 3]
            assert len(cut) - 3 >= answer


def test_plain_text_and_chat_rows_are_read(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the first\nof them\n\n \nthe other one " + "again " * 3000)
    text = read_text(tmp_path / "a.txt", checkpoint, block=4)
    assert len(text.sequences) == 6
    assert max(map(len, text.sequences)) == min(LONGEST, checkpoint.dims.context_length)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": turns, "other": 1}) + "\n\n")
    whole, *_ = read_text(tmp_path / "b.jsonl", checkpoint, block=4).sequences
    assert whole[-1] == tiny.IM_END  # the last turn is the answer, and ends


def test_no_more_is_drawn_than_needed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    text = read_text(write_rows(tmp_path / "rows.jsonl", 500), checkpoint, block=4)
    assert len(text.sequences) == SEQUENCES


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "no text; give rows"),
        ("a.txt", b" \n\n\n ", "no text; give rows"),
        ("a.jsonl", b"{\n[1]\n{}\n", r"line 1: .*\n.*line 2: an object with .*\n.*line 3: an object with"),
        ("a.jsonl", b'{"prompt": "x", "answer": 3}', "line 1: an object with"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "row 1: messages must be .*{role, content}"),
        ("a.jsonl", b'{"messages": []}', "line 1: an object with"),
        ("a.jsonl", b'{"prompt": "\\ud800"}', "row 1: .*half a character"),
        ("a.jsonl", b"[" * 100_000, "line 1: "),
        ("a.jsonl", b"\n".join([b"x"] * 60), "and 40 more"),
        ("a.txt", b"\xff\xfe\x00", r"not UTF-8 text \(byte 0\)"),
        ("a.csv", b"a,b", r"a file named .jsonl \(rows\) or .txt"),
    ],
)
def test_hostile_texts_are_refused(
    name: str, content: bytes, message: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ExportError, match=message):
        read_text(tmp_path / name, checkpoint, block=4)


def test_texts_that_are_no_readable_files_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "folder.txt").mkdir()
    for name in ("absent.jsonl", "folder.txt"):
        with pytest.raises(ExportError, match=f"{name}: the calibration text cannot be read"):
            read_text(tmp_path / name, checkpoint, block=4)


# --- layers and bundles ---
