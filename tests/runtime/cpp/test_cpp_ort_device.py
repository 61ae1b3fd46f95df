"""libmars on a GPU that stubs play: tests/ort_device_test.cpp on bundles of every output, in fp32 and fp16,
and the program that a GPU is proven with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cabi import build
from support.shell import call


@pytest.mark.parametrize("preset", ["release", pytest.param("asan", marks=pytest.mark.more)])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_steps_on_a_device(precision: str, preset: str, graphs: Callable[[str], Path]) -> None:
    env = {**os.environ, "MARS_BUNDLE": str(graphs(precision))}
    done = call(build(preset) / "tests" / "mars-ort-device", timeout=600, env=env)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "12 passed" in done.stdout


def test_the_program_for_a_gpu_rehearsed(graphs: Callable[[str], Path]) -> None:
    """benchmarks/gpu/half_hour.py runs it where there is a GPU; elsewhere it says what it lacks."""
    program, bundle = build() / "tests" / "mars-gpu-ort", str(graphs("fp32"))
    for env, code, words in (
        ({"MARS_GPU_REHEARSAL": "1", "MARS_GPU_BUNDLE": bundle}, 0, "174 of 174 checks hold"),
        ({"MARS_GPU_REHEARSAL": "1"}, 77, "skipped: MARS_GPU_BUNDLE names no bundle"),
        ({"MARS_GPU_BUNDLE": bundle}, 77, "has no CUDAExecutionProvider"),
    ):
        done = call(program, timeout=300, env={**os.environ, **env})
        assert words in done.stdout, done.stdout + done.stderr
        assert done.returncode == code
