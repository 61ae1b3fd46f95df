"""Rows that cannot be used: prompts and answers beyond the context, no text, the same ones twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.calibrations import OPTIONS, WORDS, rows

from mars_export import CalibrationError
from mars_export.calibration.tau.run import CalibrationRequest, run


def test_prompts_that_do_not_fit_are_counted_and_reported(
    request_for: Callable[..., CalibrationRequest], tmp_path: Path
) -> None:
    long = [rows().splitlines()[0].replace("hello", "a " * n) for n in (600, 40_000)]
    (tmp_path / "words.jsonl").write_text(rows() + "\n".join(long) + "\n")
    made = run(request_for())
    assert made.calibration.too_long == (len(WORDS) + 1, len(WORDS) + 2)
    assert any(
        "left out, their prompts are longer than the context: 17" in note for note in made.calibration.notes
    )
    (tmp_path / "words.jsonl").write_text(rows().splitlines()[0].replace("hello", "a " * 600))
    with pytest.raises(CalibrationError, match="every prompt is longer than the context of 512"):
        run(request_for(force=True))


def test_answers_that_fill_the_context_are_counted(
    request_for: Callable[..., CalibrationRequest], tmp_path: Path
) -> None:
    (tmp_path / "words.jsonl").write_text(
        rows()
        .splitlines()[0]
        .replace("hello", "a" * 480)
        .replace('"max_new_tokens": 12', '"max_new_tokens": 400')
    )
    made = run(request_for(options=replace(OPTIONS, guarantee=False))).calibration
    assert made.cut_short == 1 or made.answer_range[1] < 30
