"""Steps that ONNX Runtime's CUDA provider captures, over a fake of the provider: numbers, sizes, threads and
memory that its rules ask for, and what happens where it refuses or replays something else.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import onnxruntime
import pytest
from support.agreement import LOOPS, MAIN, PROMPTS, config
from support.fake_ort_cuda import FakeOrt
from support.tiny import Named

from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import ExportOptions, export_onnx
from mars_export.runtime import Batcher, Limits, Session, SessionError
from mars_export.runtime.device import ort, ort_graphs
from mars_export.runtime.device.ort import OrtBackend
from mars_export.runtime.device.ort_graphs import OPTION
from mars_export.runtime.device.ort_kept import MOST_IDLE, KeptMemory, doubled
from mars_export.runtime.device.ort_worker import Worker
from mars_export.runtime.errors import DeviceLost

BLOCK = 6
ON = {OPTION: "1"}
LONG = [(7 * i) % 250 for i in range(300)]
Graphs = Callable[[str], Path]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory, checkpoints: Named) -> Graphs:
    root = tmp_path_factory.mktemp("captured")

    @cache
    def exported(layout: str) -> Path:
        options = ExportOptions(block=BLOCK, metrics=True, logits=True, top_k=4, kv_layout=layout)
        export_onnx(open_checkpoint(str(checkpoints(MAIN))), root / layout, options)
        return root / layout

    return exported


@pytest.fixture
def opened(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Session, FakeOrt]]:
    """A session on the fake's GPU."""

    def on(
        fake: FakeOrt | None = None, layout: str = "static", options: dict[str, str] = ON, **settings: Any
    ) -> tuple[Session, FakeOrt]:
        fake = fake or FakeOrt()
        bundle = graphs(layout)
        monkeypatch.setattr(ort, "_import", lambda device: fake if device == "cuda" else onnxruntime)
        return Session.open(bundle, "cuda", options=options, cache_bytes=0, **settings), fake

    return on


def backend_of(session: Session) -> OrtBackend:
    assert isinstance(session.backend, OrtBackend)
    return session.backend


@pytest.fixture(scope="module")
def host(graphs: Graphs) -> Session:
    return Session.open(graphs("static"), "cpu", threads=1, cache_bytes=0)


@pytest.mark.parametrize("loop", LOOPS)
def test_answers_are_the_hosts_and_most_steps_are_replays(
    loop: str, opened: Callable[..., Any], host: Session
) -> None:
    session, fake = opened()
    for settings in (config(1.0), config(0.3), config(0.3, metric="margin")):
        for prompts in ([PROMPTS[0]], [*PROMPTS, LONG]):
            one, other = (s.generate_batch(prompts, settings, commit=LOOPS[loop]) for s in (session, host))
            assert [c.token_ids for c in one] == [c.token_ids for c in other]
    kinds = [kind for _, kind in fake.step.numbers]
    assert min(kinds.count("replayed"), kinds.count("plain")) > kinds.count("captured")
    assert backend_of(session).why_no_graphs is None
    assert backend_of(session).num_graphs == kinds.count("captured") > 2
    assert len(fake.step.threads) == 1
    sizes = {1, BLOCK, 2 * BLOCK - 1}
    assert fake.step.sizes <= {(slots, outputs) for slots in sizes for outputs in sizes}


def test_exact_answers_and_many_threads_share_one_thread_of_the_gpu(
    opened: Callable[..., Any], host: Session
) -> None:
    session, fake = opened()
    other, _ = opened(fake)  # the fake fails where two threads are on the GPU at once
    settings = config(None)
    expected = [host.generate(prompt, settings).token_ids for prompt in PROMPTS]
    with ThreadPoolExecutor(4) as pool, Batcher(other, Limits(max_rows=3)) as service:
        alone = [pool.submit(session.generate, prompt, settings) for prompt in PROMPTS * 2]
        shared = [service.submit(prompt, settings) for prompt in PROMPTS * 2]
        assert [a.result().token_ids for a in alone] == expected * 2
        assert [a.result().token_ids for a in shared] == expected * 2
    threads = set().union(*(each.threads for each in fake.sessions))
    assert len(threads) == 1
    assert backend_of(session).num_graphs > 0 < backend_of(other).num_graphs


def test_a_shape_runs_plainly_then_is_captured_then_replayed(opened: Callable[..., Any]) -> None:
    session, fake = opened()
    backend = backend_of(session)
    tried = fake.step.numbers.copy()
    rounds = [
        [(-1, "plain")] * 2
        + [(number, "captured"), (-1, "plain")]
        + [(number, "replayed"), (-1, "plain")] * 2
        for number in (1, 2, 3)
    ]
    assert tried == [run for each in rounds for run in each]
    rows = backend.new_cache(2)
    rows.reserve(BLOCK)
    index = np.arange(BLOCK)[None]
    addresses = []
    for start in range(5):
        ids = np.array([LONG[start * BLOCK : (start + 1) * BLOCK]])
        backend.step(rows, 0, ids, np.array([start * BLOCK]), index, False)
        addresses.append([buffer.address for buffer in rows.buffers])
    assert fake.step.numbers[len(tried) :] == [(-1, "plain"), (4, "captured"), *[(4, "replayed")] * 3]
    assert all(each == addresses[0] for each in addresses)
    assert fake.providers[0] == (
        "CUDAExecutionProvider",
        {"arena_extend_strategy": "kSameAsRequested", OPTION: "1"},
    )
    assert all(OPTION not in own for _, own in fake.providers[1:]), "copies are not captured"


def test_steps_that_want_logits_and_pieces_of_prompts_run_plainly(
    opened: Callable[..., Any], host: Session
) -> None:
    session, fake = opened()
    tried = len(fake.step.numbers)
    sampled = config(0.3, temperature=0.8, seed=3)
    for _ in range(3):
        assert session.generate(LONG, sampled).token_ids == host.generate(LONG, sampled).token_ids
    assert {number for number, _ in fake.step.numbers[tried:]} == {-1}


def test_requests_that_follow_one_another_find_their_captured_steps_again(opened: Callable[..., Any]) -> None:
    session, fake = opened()
    first = session.generate(PROMPTS[0], config(0.5)).token_ids
    for _ in range(4):
        session.generate(PROMPTS[0], config(0.5))
    count = backend_of(session).num_graphs
    for _ in range(6):
        assert session.generate(PROMPTS[0], config(0.5)).token_ids == first
    assert backend_of(session).num_graphs == count
    plain = [number for number, _ in fake.step.numbers].count(-1)
    session.generate(PROMPTS[0], config(0.5))
    assert [number for number, _ in fake.step.numbers].count(-1) - plain <= 1, "its prompt at most"


REFUSAL = (
    "This session cannot use the graph capture feature as requested by the user as all compute graph nodes"
    " have not been partitioned to the CUDAExecutionProvider"
)


def test_where_capturing_is_refused_the_session_opens_without(
    opened: Callable[..., Any], host: Session
) -> None:
    session, fake = opened(FakeOrt(refusal=REFUSAL))
    assert backend_of(session).why_no_graphs == REFUSAL
    assert [OPTION in own for _, own in fake.providers[:2]] == [True, False]
    assert session.generate(LONG, config(0.5)).token_ids == host.generate(LONG, config(0.5)).token_ids
    assert backend_of(session).num_graphs == 0


def test_a_session_that_cannot_open_at_all_is_an_error(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA failure 100: no CUDA-capable device is detected")

    monkeypatch.setattr(FakeOrt, "InferenceSession", broken)
    with pytest.raises(SessionError, match="no CUDA-capable device .* check the GPU with nvidia-smi"):
        opened()


def test_replays_that_say_something_else_are_found_before_anybody_is_served(
    opened: Callable[..., Any], host: Session
) -> None:
    """The attack: an operator on the CPU computes with a value of the inputs, which a replay does not see. It
    says wrong things, and writes entries over those of tokens long accepted.
    """
    session, fake = opened(FakeOrt(stale=True))
    assert backend_of(session).why_no_graphs == "a replayed step does not say what the same step says plainly"
    tried = len(fake.step.numbers)
    for prompt in (*PROMPTS, LONG):
        assert session.generate(prompt, config(0.3)).token_ids == host.generate(prompt, config(0.3)).token_ids
    assert {number for number, _ in fake.step.numbers[tried:]} == {-1}
    assert backend_of(session).num_graphs == 0


@pytest.mark.parametrize("nth", [1, 3, 5, 19, 20, 40])
def test_a_capture_or_replay_that_fails_ends_nothing_but_replaying(
    nth: int, opened: Callable[..., Any], host: Session
) -> None:
    words = "CUDA failure 901: operation failed due to a previous error during capture"
    session, _ = opened(FakeOrt(failing=(nth, words)))
    for prompt in PROMPTS:
        assert session.generate(prompt, config(0.3)).token_ids == host.generate(prompt, config(0.3)).token_ids
    reason = backend_of(session).why_no_graphs
    assert reason is not None
    assert reason.endswith(words)


def test_an_error_that_stays_is_told(opened: Callable[..., Any]) -> None:
    session, _ = opened(FakeOrt(failing=(25, "CUDA failure 700: an illegal memory access was encountered")))
    with pytest.raises(DeviceLost, match="CUDA failure 700"):
        session.generate(PROMPTS[0], config(0.3))
    with pytest.raises(DeviceLost, match="CUDA failure 700"):
        opened(FakeOrt(failing=(3, "CUDA failure 700: an illegal memory access was encountered")))


def test_inputs_on_the_host_and_other_layouts_are_not_captured(
    opened: Callable[..., Any], host: Session
) -> None:
    session, fake = opened(FakeOrt(on_host=lambda name: name == "kv_length"))
    assert backend_of(session).why_no_graphs == "a step's inputs or results are not all on the GPU"
    expected = host.generate(PROMPTS[1], config(0.3)).token_ids
    assert session.generate(PROMPTS[1], config(0.3)).token_ids == expected
    assert {number for number, _ in fake.step.numbers} == {-1}
    session, fake = opened(layout="delta")
    assert "delta" in str(backend_of(session).why_no_graphs)
    assert OPTION not in fake.providers[0][1]
    assert session.generate(PROMPTS[1], config(0.3)).token_ids == expected


def test_captured_steps_are_counted_out(
    opened: Callable[..., Any], host: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort_graphs, "MOST", 2)
    monkeypatch.setattr(ort_graphs, "MOST_SEEN", 3)
    session, fake = opened()
    for prompt in (*PROMPTS, *PROMPTS):
        assert session.generate(prompt, config(0.3)).token_ids == host.generate(prompt, config(0.3)).token_ids
    assert backend_of(session).num_graphs == 2
    assert {number for number, _ in fake.step.numbers} == {-1, 1, 2}


def test_which_gpu_is_said_wherever_memory_is_taken(opened: Callable[..., Any]) -> None:
    for options in ({"device_id": "2"}, {"device_id": "2"} | ON):
        session, fake = opened(options=options)
        session.generate_batch(PROMPTS, config(0.5))
        assert set(fake.indices) == {2}
        assert all(own["device_id"] == "2" for _, own in fake.providers)


def test_kept_memory_comes_again_zeroed_and_is_bounded() -> None:
    memory, kind = KeptMemory(FakeOrt(), "cuda", "CUDAExecutionProvider"), np.dtype(np.float32)
    first = memory.zeros(3, (1, 2, 8, 4), kind)
    addresses = [tensor.address for tensor in first]
    for tensor in first:
        tensor.write(np.full((1, 2, 8, 4), np.nan, np.float32))
    del tensor, first
    again = memory.zeros(3, (1, 2, 8, 4), kind)
    assert [tensor.address for tensor in again] == addresses
    assert not any(tensor.read().any() for tensor in again)
    other = memory.zeros(3, (1, 2, 8, 4), kind)
    assert not {tensor.address for tensor in other} & {*addresses}
    for entries in range(9, 30):
        memory.zeros(3, (1, 2, entries, 4), kind)
    assert sum(map(len, memory._idle.values())) <= 3 * MOST_IDLE
    assert (doubled(1, 0), doubled(513, 512), doubled(3000, 512)) == (512, 1024, 4096)


def test_an_interrupted_caller_waits_for_the_work_that_uses_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, done = Worker(), []
    assert worker.run(lambda: worker.run(lambda: 5)) == 5, "work may ask for work"
    with pytest.raises(ZeroDivisionError):
        worker.run(lambda: 1 // 0)
    result = Future.result

    def interrupted(*_: Any) -> None:
        monkeypatch.setattr(Future, "result", result)
        raise KeyboardInterrupt

    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.run(lambda: (sleep(0.2), done.append(1)))
    assert done == [1]
