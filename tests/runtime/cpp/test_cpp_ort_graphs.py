"""Steps that ONNX Runtime's CUDA provider captures for libmars, over a stub of the provider:
tests/ort_graphs_test.cpp and ort_refusals_test.cpp on bundles of every output, and the program that a GPU
is proven with."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cabi import build
from support.paths import ROOT

from mars_export.runtime.device import ort_graphs, ort_kept, ort_options

CPP = ROOT / "runtime" / "cpp" / "src" / "device"


@pytest.mark.parametrize("preset", ["release", "asan", "tsan"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_captured_steps(precision: str, preset: str, graphs: Callable[[str], Path]) -> None:
    done = subprocess.run(
        [build(preset) / "tests" / "mars-ort-graphs"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "MARS_BUNDLE": str(graphs(precision))},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "17 passed" in done.stdout


def test_the_program_for_a_gpu_on_the_stub(graphs: Callable[[str], Path]) -> None:
    done = subprocess.run(
        [build() / "tests" / "mars-gpu-ort-stub"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "MARS_GPU_BUNDLE": str(graphs("fp32"))},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on CUDA: 116 of 116 checks hold" in done.stdout


def test_both_runtimes_say_the_same() -> None:
    """Names, limits and reasons of the twins."""
    here = "".join(path.read_text(encoding="utf-8") for path in sorted(CPP.glob("ort*.?pp")))
    python = Path(ort_graphs.__file__).parent
    for words in (
        ort_graphs.OPTION,
        ort_graphs.NUMBER,
        "a replayed step does not say what the same step says plainly",
        "a step could not be captured or replayed: ",
        "a step's inputs or results are not all on the GPU",
    ):
        assert f'"{words}"' in here
        assert any(words in path.read_text(encoding="utf-8") for path in python.glob("ort*.py"))
    for limit in (
        f"most = {ort_graphs.MOST};",
        f"most_seen = {ort_graphs.MOST_SEEN};",
        f"most_idle = {ort_kept.MOST_IDLE};",
        f"least_entries = {ort_kept.LEAST};",
        f'plain_number = "{ort_graphs.PLAIN}";',
    ):
        assert limit in here
    assert ort_options.LEVEL in here
