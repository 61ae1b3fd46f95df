"""Many threads on one session of libmars, with and without sanitizers."""

from __future__ import annotations

import os

import pytest
from support.cabi import build
from support.fixtures import Named
from support.shell import call


@pytest.mark.parametrize(
    "preset",
    ["release", pytest.param("asan", marks=pytest.mark.more), pytest.param("tsan", marks=pytest.mark.more)],
)
def test_many_threads_on_one_session(preset: str, bundles: Named) -> None:
    env = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    done = call(build(preset) / "tests" / "mars-load", bundles("llama"), "4", "5", timeout=600, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong answers" in done.stdout
