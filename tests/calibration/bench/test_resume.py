"""Benchmarks that were interrupted: what is kept, what goes on, and which state is whose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.bench import OPTIONS, WORDS, shell

from mars_export import CalibrationError
from mars_export.calibration.bench.bench import BenchRequest, bench


def states(folder: Path) -> list[list[str]]:
    """The lines of every state in a folder."""
    return [path.read_text().splitlines() for path in sorted(folder.glob("state-*.jsonl"))]


def test_an_interrupted_run_goes_on(request_for: Callable[..., BenchRequest], tmp_path: Path) -> None:
    def stop_later(phase: str, done: int, _: int) -> None:
        if phase == "answers" and done >= 2 * len(WORDS):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(request_for(), stop_later)
    assert not (tmp_path / "out" / "bench.json").exists()
    with pytest.raises(CalibrationError, match="finished pieces of this work; --resume uses them, --force"):
        bench(request_for())
    with pytest.raises(CalibrationError, match=r"this is the state of other work \(another settings\)"):
        bench(request_for(resume=True, options=replace(OPTIONS, taus=(0.9,))))
    with pytest.raises(CalibrationError, match=r"another data"):
        bench(request_for(resume=True, options=replace(OPTIONS, limit=2)))
    work: dict[str, list[int]] = {}
    bench(request_for(resume=True), lambda phase, done, total: work.setdefault(phase, []).append(done))
    (state,) = states(tmp_path / "out")
    assert len(state) == 1 + 6 + 2 * len(OPTIONS.settings)
    assert bench(request_for(force=True, options=replace(OPTIONS, batches=(1,), rounds=1))).num_rows == len(
        WORDS
    )


def test_ctrl_c_from_the_shell(
    request_for: Callable[..., BenchRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mars_export.calibration.bench.bench.serve", stopped)
    done = shell(
        request_for().bundle,
        "--task",
        request_for().task,
        "-o",
        tmp_path / "out",
        "--threads",
        "1",
        "--rounds",
        "1",
    )
    assert done.exit_code == 130
    assert "the same command and --resume" in done.output
    (state,) = states(tmp_path / "out")
    assert len(state) == 1 + 3
