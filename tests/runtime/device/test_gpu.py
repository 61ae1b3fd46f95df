"""What only a GPU can show: engines that run. `pytest -m gpu`; skipped, with the reason, elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import pytest
from support.agreement import PROMPTS, config

from mars_export import Session
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export_options import EngineOptions, ExportOptions
from mars_export.exporter.tensorrt.engines import export_engine
from mars_export.runtime.decode.backend import StepInput
from mars_export.runtime.device.cuda import find_gpu
from mars_export.runtime.device.trt.backend import TrtBackend
from mars_export.runtime.device.trt.engine import EXTRAS, find

BLOCK = 6
Opened = Callable[[str, str], tuple[Session, Session]]
NO_GPU = gpu if isinstance(gpu := find_gpu(), str) else None
NO_TENSORRT = None if any(map(find, EXTRAS)) else "neither TensorRT-RTX nor TensorRT is installed"
OBSTACLE = NO_GPU or NO_TENSORRT
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(OBSTACLE is not None, reason=f"{OBSTACLE}")]


@pytest.fixture(scope="module")
def opened(checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Sessions of one bundle on the GPU and on the CPU, by precision and KV layout."""
    root = tmp_path_factory.mktemp("gpu")

    @cache
    def both(precision: str, layout: str) -> tuple[Session, Session]:
        target = root / f"{precision}-{layout}"
        engine = EngineOptions(target="host", batch=5, capacity=512, prefill=64, kv_layout=layout)
        export_engine(
            open_checkpoint(str(checkpoints("a2d-qwen2"))),
            target,
            ExportOptions(block=BLOCK, precision=precision, top_k=4),
            engine,
        )
        return Session.open(target, "cuda"), Session.open(target, "cpu", threads=1)

    return both


@pytest.mark.parametrize("layout", ["in-place", "appended"])
@pytest.mark.parametrize("tau", [1.0, 0.7, 0.3])
def test_fp32_tokens_are_onnxruntimes(tau: float, layout: str, opened: Opened) -> None:
    gpu, cpu = opened("fp32", layout)
    for prompt in PROMPTS:
        assert gpu.generate(prompt, config(tau)).token_ids == cpu.generate(prompt, config(tau)).token_ids
    for one, other in zip(
        gpu.generate_batch(PROMPTS, config(tau)), cpu.generate_batch(PROMPTS, config(tau)), strict=True
    ):
        assert one.token_ids == other.token_ids
        assert one.confidences == pytest.approx(other.confidences, abs=1e-3)


@pytest.mark.parametrize("layout", ["in-place", "appended"])
def test_fp16_decisions_flip_rarely(layout: str, opened: Opened) -> None:
    gpu, cpu = opened("fp16", layout)
    ids = np.array([[(31 * i) % 250 for i in range(40)]])
    flips = total = 0
    caches = [s.backend.new_cache(1) for s in (gpu, cpu)]
    for cached in caches:
        cached.reserve(64)
    for start in range(0, 40, BLOCK):
        window = ids[:, start : start + BLOCK]
        index = np.arange(window.shape[1])[None]
        one, other = (
            s.backend.step(c, 0, StepInput(window, np.array([start]), index), False)
            for s, c in zip((gpu, cpu), caches, strict=True)
        )
        flips += int(((one.confidence >= 0.9) != (other.confidence >= 0.9)).sum()) + int(
            (one.token_ids != other.token_ids).sum()
        )
        total += window.shape[1]
    assert flips <= max(1, total // 20), "at most one decision in twenty"


@pytest.mark.parametrize("layout", ["in-place", "appended"])
def test_the_likeliest_tokens_are_onnxruntimes(layout: str, opened: Opened) -> None:
    ids = np.array([[(31 * i) % 250 for i in range(BLOCK)]] * 2)
    steps = []
    for session in opened("fp32", layout):
        cache_rows = session.backend.new_cache(2)
        cache_rows.reserve(64)
        index = np.tile(np.arange(BLOCK), (2, 1))
        for _ in range(3):  # the last time from a captured step
            step = session.backend.step(cache_rows, 0, StepInput(ids, np.zeros(2, np.int64), index), False)
        steps.append(step)
    gpu, cpu = steps
    assert gpu.topk_ids is not None and gpu.topk_logprobs is not None and cpu.topk_logprobs is not None
    np.testing.assert_allclose(gpu.topk_logprobs, cpu.topk_logprobs, atol=1e-3)
    assert (gpu.topk_ids == cpu.topk_ids).mean() > 0.98, "but for those that are as likely"
    assert (gpu.topk_ids[..., 0] == gpu.token_ids).all()


def test_a_step_is_captured_and_says_the_same(opened: Opened) -> None:
    gpu, _ = opened("fp32", "in-place")
    assert isinstance(gpu.backend, TrtBackend)
    first = gpu.generate(PROMPTS[0], config(0.5)).token_ids
    assert all(gpu.generate(PROMPTS[0], config(0.5)).token_ids == first for _ in range(3))
    assert gpu.backend.num_graphs > 0


def test_a_thousand_requests_do_not_grow(opened: Opened) -> None:
    from cuda.bindings import runtime

    gpu, _ = opened("fp16", "in-place")
    for _ in range(20):
        gpu.generate(PROMPTS[0], config(0.5, max_new_tokens=8))
    _, before, _ = runtime.cudaMemGetInfo()
    for i in range(1000):
        gpu.generate(PROMPTS[i % 2], config(0.5, max_new_tokens=8))
    _, after, _ = runtime.cudaMemGetInfo()
    assert before - after < 16 << 20


@pytest.mark.slow
def test_a_context_of_4096_tokens_and_the_cost_of_a_step(tmp_path: Path) -> None:
    """Prints medians at 1, block and 2 x block slots: write them to docs/measurements.md with the machine; no
    bound is asserted.
    """
    engine = EngineOptions(target="host", capacity=4096, prefill=512)
    export_engine(open_checkpoint(None), tmp_path / "b", ExportOptions(block=8, precision="fp16"), engine)
    session = Session.open(tmp_path / "b", "cuda")
    prompt = [(7 * i) % 1000 for i in range(4000)]
    done = session.generate(prompt, config(0.9, max_new_tokens=90))
    assert len(done.token_ids) == 90
    assert done.finish_reason == "length"
    cache_rows = session.backend.new_cache(1)
    for slots in (1, 8, 16):
        ids, index = np.full((1, slots), 5), np.zeros((1, 1), np.int64)
        times = []
        for _ in range(60):
            begun = perf_counter()
            session.backend.step(cache_rows, 0, StepInput(ids, np.array([256]), index), False)
            times.append(perf_counter() - begun)
        print(f"{slots} slots: {1000 * median(times[10:]):.2f} ms")  # noqa: T201
