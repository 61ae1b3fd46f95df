"""What the TensorRT backend refuses, and what it says of steps that failed."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from support.fake_trt import BLOCK, CAPACITY, build

from mars_export import SessionError
from mars_export.runtime.decode.backend import StepInput


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(
        SessionError, match="4 rows, but this engine was built for at most 3; build it again with --batch 4"
    ):
        build()[0].new_cache(4)


def test_an_engine_of_another_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _, _ = build()
    monkeypatch.setattr(
        "support.fake_engine.FakeContext.set_tensor_address",
        lambda self, name, address: name != "present.1.key",
    )
    cache = backend.new_cache(1)
    with pytest.raises(
        SessionError,
        match=r"the engine and the manifest disagree about present.1.key; build the engine again",
    ):
        backend.step(cache, 0, StepInput(np.array([[1, 2]]), np.array([0]), np.array([[0]])), False)


def test_a_row_that_is_too_long_is_told_so() -> None:
    backend, _, _ = build()
    cache = backend.new_cache(2)
    lengths, index = np.array([CAPACITY - 1, 0]), np.array([[1], [1]])
    with pytest.raises(
        SessionError, match="would write entry 65 of a row, this engine holds 64; shorten the prompt"
    ):
        backend.step(cache, 0, StepInput(np.full((2, 2), 5), lengths, index), False)


def test_the_most_predictions_are_the_engines() -> None:
    assert build()[0].max_outputs == 2 * BLOCK - 1
    assert build(fixed=True)[0].max_outputs == BLOCK
    backend, _, _ = build()
    index = np.zeros((1, 2 * BLOCK), np.int64)
    with pytest.raises(SessionError, match="1 x 7 slots with 8 predictions is beyond this engine"):
        backend.step(backend.new_cache(1), 0, StepInput(np.full((1, 7), 5), np.array([0]), index), False)


def test_an_error_that_stays_is_told_each_time() -> None:
    backend, _, device = build()
    cache = backend.new_cache(1)
    device.is_broken = True
    for _ in range(3):
        with pytest.raises(SessionError, match="CUDA: .* failed: an illegal memory access was encountered"):
            backend.step(cache, 0, StepInput(np.array([[1, 2]]), np.array([0]), np.array([[0]])), False)


def test_an_error_that_stays_is_told_when_tensorrt_meets_it_first() -> None:
    backend, engine, device = build()
    cache = backend.new_cache(1)
    plan = StepInput(np.array([[1, 2]]), np.array([0]), np.array([[0]]))
    for _ in range(3):
        backend.step(cache, 0, plan, False)
    engine.breaks = True
    for _ in range(2):
        with pytest.raises(SessionError, match="illegal memory access .* restart it"):
            backend.step(cache, 0, plan._replace(input_ids=np.array([[1]])), False)
    del cache, backend
    gc.collect()
    assert device.closed == 1, "without a word"


def test_a_step_that_failed_leaves_the_next_one_right() -> None:
    backend, engine, _ = build()
    cache = backend.new_cache(1)
    plan = StepInput(np.array([[1, 2]]), np.array([0]), np.array([[0]]))
    expected = backend.step(cache, 0, plan, False).token_ids.tolist()
    for _ in range(3):
        engine.fails = True
        with pytest.raises(SessionError, match="TensorRT failed"):
            backend.step(backend.new_cache(1), 0, plan, False)
        engine.fails = False
        assert backend.step(cache, 0, plan, False).token_ids.tolist() == expected
