"""Benchmarks that cannot be run, and estimates: nothing is measured, nothing is overwritten."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.bench import OPTIONS, WORDS, shell

from mars_export import BundleError, CalibrationError, MarsError
from mars_export.calibration.bench.bench import BenchRequest, bench, estimate
from mars_export.runtime.bundle.open import open_bundle, write_manifest


def test_a_bundle_without_a_tokenizer(request_for: Callable[..., BenchRequest], tmp_path: Path) -> None:
    bundle = shutil.copytree(request_for().bundle, tmp_path / "mute.bundle")
    write_manifest(bundle, replace(open_bundle(bundle).manifest, text=None))
    with pytest.raises(CalibrationError, match="no tokenizer, but tasks are text"):
        bench(request_for(bundle=bundle))
    assert not (tmp_path / "out").exists()


def test_folders_that_are_not_ours(request_for: Callable[..., BenchRequest], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(CalibrationError, match="has other files but no benchmark"):
        bench(request_for(output=tmp_path / "mine"))
    with pytest.raises(CalibrationError, match="the report's folder is a file"):
        bench(request_for(output=tmp_path / "words.jsonl"))
    with pytest.raises(CalibrationError, match="the report's folder cannot be created"):
        bench(request_for(output=tmp_path / "words.jsonl" / "deeper"))
    bench(
        request_for(
            output=tmp_path / "mine",
            force=True,
            options=replace(OPTIONS, batches=(1,), commits=("cursor",), rounds=1, limit=1),
        )
    )
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_an_estimate_writes_nothing(request_for: Callable[..., BenchRequest], tmp_path: Path) -> None:
    found = estimate(request_for())
    assert (found.num_rows, found.num_settings) == (len(WORDS), len(OPTIONS.settings))
    assert found.seconds > found.step_seconds > 0
    assert not (tmp_path / "out").exists()
    done = shell(
        request_for().bundle,
        "--task",
        request_for().task,
        "-o",
        tmp_path / "out",
        "--threads",
        "1",
        "--dry-run",
        "--json",
    )
    assert json.loads(done.stdout)["num_rows"] == len(WORDS)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--task", "sums"], CalibrationError, "sums: cannot be read.*arithmetic or assistant"),
        (["--batch", "0"], CalibrationError, "batch must be 1 or more, not 0"),
        (["--batch", "two"], MarsError, "--batch must be whole numbers"),
        (["--tau", "nan"], CalibrationError, "tau must be a number of 0 or more, not nan"),
        (["--tau", "fast"], MarsError, "--tau must be numbers"),
        (["--tau", ",", "--no-exact"], CalibrationError, "give at least one tau"),
        (["--window", "wide"], CalibrationError, "window must be"),
        (["--commit", "often"], CalibrationError, "commit must be one of"),
        (
            ["--rounds", "0", "--limit", "-3"],
            CalibrationError,
            "rounds must be 1 or more, not 0; limit must be 1 or more, not -3",
        ),
        (["--variant", "nothing"], BundleError, "nothing"),
    ],
)
def test_wrong_requests_measure_nothing(
    request_for: Callable[..., BenchRequest],
    tmp_path: Path,
    arguments: list[str],
    error: type[MarsError],
    message: str,
) -> None:
    done = shell(request_for().bundle, "--task", request_for().task, "-o", tmp_path / "out", *arguments)
    assert isinstance(done.exception, error)
    with pytest.raises(error, match=message):
        raise done.exception
    assert not (tmp_path / "out").exists()
