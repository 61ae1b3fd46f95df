"""What only a GPU can show of ONNX Runtime on CUDA. `pytest -m gpu`; skipped, with the reason, elsewhere."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from pathlib import Path

import onnxruntime
import pytest
from support import families, tiny
from support.agreement import LOOPS, PROMPTS, config
from support.fixtures import Exported

from mars_export import Batcher, Limits, Session
from mars_export.runtime.device.cuda import find_gpu
from mars_export.runtime.device.ort.cuda_backend import CudaBackend
from mars_export.runtime.device.ort.library import provider_of

LONG = [(7 * i) % 250 for i in range(300)]
HEAVY = {"Attention", "MatMul", "MatMulNBits", "TensorScatter", "RotaryEmbedding", "RMSNormalization"}
FAMILIES = ("qwen3", "gemma3", "gemma2", "llama-bias", "smollm3-windows", "olmo2-mha", "phi3")
Opened = Callable[[str, str], tuple[Session, Session]]


def reason() -> str | None:
    """Why ONNX Runtime cannot use a GPU here, None if it can."""
    if provider_of(onnxruntime, "cuda") is None:
        return f"this onnxruntime {onnxruntime.__version__} has no CUDAExecutionProvider"
    gpu = find_gpu()
    return gpu if isinstance(gpu, str) else None


NO_GPU = reason()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NO_GPU is not None, reason=f"{NO_GPU}")]


@pytest.fixture(scope="module")
def opened(exported: Exported) -> Opened:
    """Sessions of one bundle on the GPU, by precision and variant, and on the CPU."""

    def both(precision: str, variant: str) -> tuple[Session, Session]:
        bundle = exported("a2d-qwen2", precision=precision, logits=True)
        return Session.open(bundle, "cuda", variant=variant), Session.open(bundle, "cpu", threads=1)

    return cache(both)


@pytest.mark.parametrize("variant", ["model", "fp32-cuda"])
@pytest.mark.parametrize("loop", LOOPS)
def test_fp32_tokens_are_the_cpus(loop: str, variant: str, opened: Opened) -> None:
    gpu, cpu = opened("fp32", variant)
    for tau in (1.0, 0.3):
        one, other = (
            s.generate_batch([*PROMPTS, LONG], config(tau), cache_block=LOOPS[loop]) for s in (gpu, cpu)
        )
        assert [c.token_ids for c in one] == [c.token_ids for c in other]


@pytest.mark.parametrize("name", FAMILIES)
def test_captured_steps_of_other_layers_give_the_cpus_tokens(
    name: str, exported: Exported, tmp_path: Path
) -> None:
    """Norms of queries, windows, caps, biases and heads of their own take other kernels. Closing the session
    frees what its captured steps read.
    """
    path = exported(tiny.write(families.ALL[name], tmp_path / "checkpoint"), precision="fp32")
    gpu, cpu = Session.open(path, "cuda", variant="fp32-cuda"), Session.open(path, "cpu", threads=1)
    for _ in range(2):  # a step is captured when it comes again
        one, other = (s.generate_batch([*PROMPTS, LONG], config(1.0), cache_block=1) for s in (gpu, cpu))
        assert [c.token_ids for c in one] == [c.token_ids for c in other]
    del gpu
    gc.collect()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("variant", ["model", "cuda"])
def test_kv_rows_stay_on_the_gpu_and_nothing_heavy_runs_elsewhere(
    variant: str, precision: str, opened: Opened
) -> None:
    backend = opened(precision, "model" if variant == "model" else f"{precision}-cuda")[0].backend
    assert isinstance(backend, CudaBackend)
    assert not backend.on_cpu.keys() & HEAVY, backend.on_cpu
    assert backend.on_cpu.get("Concat", 0) <= 1, "a shape; KV entries are two in each layer"


def test_fp16_sampling_and_continuous_batching_run(opened: Opened) -> None:
    gpu, _ = opened("fp16", "fp16-cuda")
    settings = config(0.3, temperature=0.8, seed=3)
    alone = [gpu.generate(prompt, settings).token_ids for prompt in PROMPTS]
    again = [c.token_ids for c in gpu.generate_each(PROMPTS, settings, batch=2)]
    assert sum(a == b for a, b in zip(alone, again, strict=True)) >= len(PROMPTS) - 1, (
        "fp16 may break one tie"
    )


def test_a_batcher_and_the_prefix_store_give_the_cpus_answers(opened: Opened) -> None:
    gpu, cpu = opened("fp32", "fp32-cuda")
    stored = Session.open(gpu.bundle.path, "cuda", cache_bytes=64 << 20)
    with Batcher(stored, Limits(max_rows=3)) as service:
        answers = [service.submit(prompt, config(None)) for prompt in (*PROMPTS, LONG) * 3]
        for prompt, answer in zip((*PROMPTS, LONG) * 3, answers, strict=True):
            assert answer.result().token_ids == cpu.generate(prompt, config(None)).token_ids
    assert answers[-1].result().stats.cached_tokens > 0
