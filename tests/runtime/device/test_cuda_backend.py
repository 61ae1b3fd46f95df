"""ONNX Runtime on a GPU, on a fake one: answers are the CPU's, and captured steps stay right."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.agreement import LOOPS, PROMPTS, config
from support.fake_ort_cuda import FakeCuda, pretend

from mars_export import Batcher, Limits, Session, SessionError
from mars_export.runtime.device.ort import cuda_backend, library
from mars_export.runtime.device.ort.cuda_backend import CudaBackend
from mars_export.runtime.errors import MarsWarning

LONG = [(7 * i) % 250 for i in range(300)]
Graphs = Callable[[str, str], Path]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setattr(cuda_backend, "MIN_CAPACITY", 32)  # so that rows grow
    return pretend(monkeypatch)


def backend(session: Session) -> CudaBackend:
    assert isinstance(session.backend, CudaBackend)
    return session.backend


@pytest.mark.parametrize(
    ("precision", "variant", "share"), [("fp32", "model", 1), ("fp32", "cuda", 1), ("fp16", "cuda", 0.8)]
)
def test_answers_are_the_cpus(
    precision: str, variant: str, share: float, graphs: Graphs, fake: FakeCuda
) -> None:
    """In half precision the two graphs round in other places, and a random model's tokens are often close."""
    bundle = graphs("in-place", precision)
    cpu = Session.open(bundle, threads=1, cache_bytes=0)
    name = variant if variant == "model" else f"{precision}-cuda"
    gpu = Session.open(bundle, "cuda", cache_bytes=0, variant=name)
    prompts, same, total = [*PROMPTS, LONG], 0, 0
    for settings in (config(1.0), config(0.3), config(0.3, temperature=0.8, seed=3), config(None)):
        for cache_block in LOOPS.values() if settings.tau else (1,):
            one, other = (s.generate_batch(prompts, settings, cache_block=cache_block) for s in (cpu, gpu))
            same += sum(a.token_ids == b.token_ids for a, b in zip(one, other, strict=True))
            total += len(prompts)
    assert same >= share * total
    kinds = [kind for kind, _ in fake.sessions[0].runs]
    if variant == "model":  # what it splits cannot be captured
        assert set(kinds) == {"eager"}
    else:
        assert kinds.count("replay") > 2 * kinds.count("capture") > 0
        width = backend(gpu).decode_slots
        assert {slots for kind, slots in fake.sessions[0].runs if kind != "eager"} == {width}


def test_requests_one_after_the_other_replay_what_the_first_captured(graphs: Graphs, fake: FakeCuda) -> None:
    session = Session.open(graphs("in-place", "fp32"), "cuda", cache_bytes=0)
    runs, answers = fake.sessions[0].runs, set()
    for _ in range(4):
        before = len(runs)
        answers.add(tuple(session.generate(PROMPTS[0], config(1.0)).token_ids))
        gc.collect()
    assert len(answers) == 1
    assert {kind for kind, _ in runs[before:]} == {"replay"}
    live = len(fake.devices[0].live)
    for _ in range(50):
        session.generate(PROMPTS[0], config(1.0))
    assert len(fake.devices[0].live) == live, "nothing grows"


def test_a_row_that_grows_is_captured_again_and_the_old_step_is_released(
    graphs: Graphs, fake: FakeCuda
) -> None:
    cpu = Session.open(graphs("in-place", "fp32"), threads=1, cache_bytes=0)
    gpu = Session.open(graphs("in-place", "fp32"), "cuda", cache_bytes=0)
    backend(gpu)._pool._max_idle = 0
    settings = config(1.0, max_new_tokens=120, eos_ids=())
    for prompt in (PROMPTS[0], LONG, PROMPTS[1]):
        assert gpu.generate(prompt, settings).token_ids == cpu.generate(prompt, settings).token_ids
    session = fake.sessions[0]
    assert sum(kind == "capture" for kind, _ in session.runs) > 3
    assert session.released, "memory that was given back had captured steps"
    assert len(session.captured) <= cuda_backend.MAX_SHAPES


def test_few_shapes_are_kept(graphs: Graphs, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_backend, "MAX_SHAPES", 2)
    cpu = Session.open(graphs("in-place", "fp32"), threads=1, cache_bytes=0)
    gpu = Session.open(graphs("in-place", "fp32"), "cuda", cache_bytes=0)
    prompts = [*PROMPTS, LONG]
    for settings in (config(1.0), config(0.3)):
        one, other = (list(s.generate_each(prompts, settings, batch=3)) for s in (cpu, gpu))
        assert [c.token_ids for c in one] == [c.token_ids for c in other]
        assert len(backend(gpu)._shapes) <= 2
    assert len(fake.sessions[0].captured) <= 2


def test_a_step_that_prepares_its_shape_is_not_a_cost(graphs: Graphs, fake: FakeCuda) -> None:
    session = Session.open(graphs("in-place", "fp32"), "cuda", cache_bytes=0)
    step, prepared = backend(session).step, []
    backend(session).step = lambda *inputs: (out := step(*inputs), prepared.append(out.is_prepared))[0]  # type: ignore[method-assign, assignment]
    session.generate(PROMPTS[0], config(1.0))
    kinds = [kind for kind, _ in fake.sessions[0].runs]
    assert kinds[:4] == ["eager", "eager", "capture", "replay"]
    assert prepared[:3] == [False, False, True]
    assert prepared.count(False) == kinds.count("eager")
    assert prepared.count(True) == kinds.count("replay")


def test_a_batcher_with_a_prefix_cache_gives_the_cpus_answers(graphs: Graphs, fake: FakeCuda) -> None:
    cpu = Session.open(graphs("in-place", "fp32"), threads=1, cache_bytes=0)
    gpu = Session.open(graphs("in-place", "fp32"), "cuda", cache_bytes=64 << 20)
    prompts = (*PROMPTS, LONG) * 3
    with Batcher(gpu, Limits(max_rows=3)) as service:
        answers = [service.submit(prompt, config(None)) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.result().token_ids == cpu.generate(prompt, config(None)).token_ids
    assert answers[-1].result().stats.cached_tokens > 0
    assert any(kind == "replay" for kind, _ in fake.sessions[0].runs)


def test_another_thread_captures_its_own(graphs: Graphs, fake: FakeCuda) -> None:
    session = Session.open(graphs("in-place", "fp32"), "cuda", cache_bytes=0)
    expected = session.generate(PROMPTS[0], config(1.0)).token_ids
    answers, before = [], len(fake.sessions[0].runs)
    other = threading.Thread(
        target=lambda: answers.append(session.generate(PROMPTS[0], config(1.0)).token_ids)
    )
    other.start()
    other.join()
    assert answers == [expected]
    assert [kind for kind, _ in fake.sessions[0].runs[before:]].count("capture") > 0


def test_a_failed_step_leaves_nothing_bound(graphs: Graphs, fake: FakeCuda) -> None:
    session = Session.open(graphs("in-place", "fp32"), "cuda", cache_bytes=0)
    expected = session.generate(PROMPTS[0], config(1.0)).token_ids
    run, session_ = type(fake.sessions[0]).run_with_iobinding, fake.sessions[0]

    def fail(*_: object) -> None:
        raise RuntimeError("Failed to allocate memory for requested buffer")

    session_.run_with_iobinding = fail  # type: ignore[method-assign]
    with pytest.raises(SessionError, match=r"step of 1 x \d+ slots.* not enough memory") as caught:
        session.generate(PROMPTS[0], config(1.0))
    assert caught.value.code == "out_of_memory"
    waiting = [work.__qualname__ for work in fake.devices[0].queue]
    assert all("zero" in name for name in waiting), "its copies are done before the next step writes"
    session_.run_with_iobinding = run.__get__(session_)  # type: ignore[method-assign]
    assert session.generate(PROMPTS[0], config(1.0)).token_ids == expected


def test_graphs_can_be_turned_off(graphs: Graphs, fake: FakeCuda) -> None:
    gpu = Session.open(graphs("in-place", "fp32"), "cuda", options={"enable_cuda_graph": "0"})
    gpu.generate(PROMPTS[0], config(1.0))
    assert {kind for kind, _ in fake.sessions[0].runs} == {"eager"}


def test_a_graph_that_cannot_be_captured_runs_and_says_so(
    graphs: Graphs, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _ = library.load("cuda")
    opened = module.InferenceSession

    def refuse(graph: Path, options: Any, providers: Any, **rest: Any) -> Any:
        if providers[0][1]["enable_cuda_graph"] == "1":
            raise RuntimeError("This session cannot use the graph capture feature as requested by the user")
        return opened(graph, options, providers, **rest)

    monkeypatch.setattr(module, "InferenceSession", refuse)
    with pytest.warns(MarsWarning, match="not captured"):
        gpu = Session.open(graphs("in-place", "fp32"), "cuda", cache_bytes=0)
    assert gpu.generate(PROMPTS[0], config(1.0)).token_ids
    assert {kind for kind, _ in fake.sessions[0].runs} == {"eager"}


def test_logits_are_those_of_the_step(graphs: Graphs, fake: FakeCuda) -> None:
    """They are always bound, and copied only when a request wants them."""
    cpu = Session.open(graphs("in-place", "fp32"), threads=1, cache_bytes=0)
    gpu = Session.open(graphs("in-place", "fp32"), "cuda", cache_bytes=0)
    settings = config(0.3, temperature=0.9, seed=5, top_p=0.9)
    assert gpu.generate(PROMPTS[1], settings).token_ids == cpu.generate(PROMPTS[1], settings).token_ids
    downloads = [size for kind, size in fake.devices[0].events if kind == "download"]
    assert max(downloads) >= np.prod((backend(gpu).decode_slots, cpu.bundle.manifest.model.vocab_size)) * 4


def test_a_session_that_does_not_open_closes_its_device_once(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = ("MatMul", "layers.0.qkv")
    fake = pretend(monkeypatch, node)
    with pytest.raises(SessionError, match="leaves 1 operators on hidden states to the CPU"):
        Session.open(graphs("in-place", "fp32"), "cuda", strict=True)
    gc.collect()
    assert [device.closed for device in fake.devices] == [1]
