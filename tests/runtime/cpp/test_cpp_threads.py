"""Many threads on one session of libmars, with and without sanitizers."""

from __future__ import annotations

import os
import subprocess

import pytest
from support.cabi import build
from support.fixtures import Named


@pytest.mark.parametrize(
    "preset",
    ["release", pytest.param("asan", marks=pytest.mark.more), pytest.param("tsan", marks=pytest.mark.more)],
)
def test_many_threads_on_one_session(preset: str, bundles: Named) -> None:
    done = subprocess.run(
        [build(preset) / "tests" / "mars-load", bundles("llama"), "4", "5"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong answers" in done.stdout
