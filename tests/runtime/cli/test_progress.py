"""Progress if standard error is not a terminal: a line for each phase, and one every ten seconds."""

from __future__ import annotations

import pytest

from mars_export.runtime.terminal import console


def test_a_long_phase_has_a_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(console, "monotonic", lambda: now[0])
    with console.progress_bars() as bars:
        report = console.advance(bars)
        report("rows", 0, 0, "40 rows can show a drop below 0.12")
        report("exact", 0, 40, "0 tokens, at most 90 s left")
        for done, seconds in ((1, 3.0), (2, 9.0), (3, 10.5), (4, 12.0), (5, 20.6)):
            now[0] = seconds
            report("exact", done, 40, f"{done}00 tokens, at most {90 - seconds:.0f} s left")
        report("tau 0.97", 31, 40, "1,500 tokens, at most 60 s left")
        report("weights", 0, 4)
        for done, seconds in ((1, 40.0), (2, 1040.0)):
            now[0] = seconds
            report("weights", done, 4)
    assert capsys.readouterr().err.splitlines() == [
        "rows: 40 rows can show a drop below 0.12",
        "exact ...",
        "exact 3 of 40, 300 tokens, at most 80 s left",
        "exact 5 of 40, 500 tokens, at most 69 s left",
        "tau 0.97 ...",
        "weights ...",
        "weights 1 of 4, about 58 s left",
        "weights 2 of 4, about 17 min left",
    ]
