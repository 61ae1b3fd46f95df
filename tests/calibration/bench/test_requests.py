"""Benchmarks that cannot be run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.calibrations import shell

from mars_export import BundleError, CalibrationError, MarsError
from mars_export.calibration.bench import BenchRequest, bench
from mars_export.runtime.bundle.open import open_bundle, write_manifest


def test_a_bundle_without_a_tokenizer(request_for: Callable[..., BenchRequest], tmp_path: Path) -> None:
    bundle = shutil.copytree(request_for().bundle, tmp_path / "mute.bundle")
    write_manifest(bundle, replace(open_bundle(bundle).manifest, text=None))
    with pytest.raises(CalibrationError, match="no tokenizer, but tasks are text"):
        bench(request_for(bundle=bundle))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--task", "sums"], CalibrationError, "sums: cannot be read.*arithmetic or assistant"),
        (["--batch", "two"], MarsError, "--batch must be whole numbers"),
        (["--tau", "fast"], MarsError, "--tau must be numbers"),
        (["--tau", ",", "--no-exact"], CalibrationError, "give at least one tau"),
        (
            ["--rounds", "0", "--limit", "-3"],
            CalibrationError,
            "rounds must be 1 or more, not 0; limit must be 1 or more, not -3",
        ),
        (["--variant", "nothing"], BundleError, "nothing"),
    ],
)
def test_wrong_requests_measure_nothing(
    request_for: Callable[..., BenchRequest], arguments: list[str], error: type[MarsError], message: str
) -> None:
    done = shell("bench", request_for().bundle, "--task", request_for().task, *arguments)
    assert isinstance(done.exception, error)
    with pytest.raises(error, match=message):
        raise done.exception
