"""A TensorRT backend over the fake GPU, its answers, and the model behind them."""

from __future__ import annotations

from mars_export import GenerationConfig
from mars_export.runtime.decode.backend import Backend
from mars_export.runtime.decode.sequence import Sequence
from mars_export.runtime.device.trt.backend import TrtBackend
from support.fake import MASK
from support.fake_cuda import FakeDevice
from support.fake_engine import MODEL, FakeEngine, engine_info, engine_variant
from support.loops import decode

BLOCK, CAPACITY, PREFILL = 4, 64, 16


def predict(known: tuple[int, ...], masks: int) -> tuple[int, float]:
    """A token and a confidence that depend on everything seen, and are sure about two times in three."""
    mixed = (sum((i + 3) * t for i, t in enumerate(known)) * 31 + masks * 17) % 997
    return mixed + 1, 0.95 if mixed % 3 else 0.4


def build(
    kv_layout: str = "in-place", *, fixed: bool = False, batch: int = 3, refuse: bool = False, top_k: int = 0
) -> tuple[TrtBackend, FakeEngine, FakeDevice]:
    """The backend, its engine and their device."""
    device = FakeDevice(refuse_capture=refuse)
    info = engine_info(batch, BLOCK, PREFILL, fixed=fixed)
    engine = FakeEngine(device, info, predict, kv_layout == "in-place", top_k)
    variant = engine_variant(info, CAPACITY, kv_layout, fixed=fixed, top_k=top_k > 0)
    backend = TrtBackend(engine, variant, MODEL, device)  # type: ignore[arg-type]
    return backend, engine, device


def answers(
    backend: Backend, prompts: list[list[int]], cache_block: int = 1, new: int = 20
) -> list[list[int]]:
    """The tokens of each prompt; every one gets one token less than the one before it."""
    rows = [
        Sequence(i, p, GenerationConfig(tau=0.9, max_new_tokens=new - i, eos_ids=()), ())
        for i, p in enumerate(prompts)
    ]
    for _ in decode(backend, rows, BLOCK, MASK, cache_block=cache_block):
        pass
    return [row.tokens for row in rows]


PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30]]
