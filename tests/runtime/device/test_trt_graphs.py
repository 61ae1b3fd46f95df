"""Captured steps of the TensorRT backend over a fake GPU: whose they are, how many, and which are none."""

from __future__ import annotations

import numpy as np
import pytest
from support.fake_trt import BLOCK, CAPACITY, build

from mars_export.runtime.decode.backend import StepInput


def test_a_captured_step_belongs_to_its_rows_and_memory() -> None:
    backend, engine, device = build()
    one, two = backend.new_cache(2), backend.new_cache(2)
    ids, index = np.array([[4, 5]]), np.array([[1]])
    for cache in (one, two):
        for first in (0, 1):
            for _ in range(3):
                backend.step(cache, first, StepInput(ids + first, np.array([0]), index), False)
    assert device.graphs == device.forgotten + 1 == 4, "a context is bound anew, and captures anew"
    assert len(engine.contexts) == 5, "those of the opening, and one for this size"
    for cache in (one, two):
        keys = device.view(cache.memory.addresses[0], (2, 2, CAPACITY, 4), np.float32)
        assert keys[:2, 0, :2, 0].tolist() == [[4, 5], [5, 6]]


def test_contexts_are_made_at_opening_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mars_export.runtime.device.trt.backend.MAX_CONTEXTS", 5)
    backend, engine, _ = build()
    assert len(engine.contexts) == 4, "1, block and 2 x block - 1 slots, and prompts"
    cache = backend.new_cache(3)
    for rows in (1, 2, 3):
        for slots, outputs in ((1, 1), (BLOCK, 1), (2 * BLOCK - 1, 1), (2 * BLOCK - 1, BLOCK)):
            for _ in range(2):
                ids, index = np.full((rows, slots), 2), np.zeros((rows, outputs), np.int64)
                backend.step(cache, 0, StepInput(ids, np.zeros(rows, np.int64), index), False)
    assert sum(context.is_alive for context in engine.contexts) == 5
    assert backend.num_graphs <= 5


def test_contexts_take_a_part_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter(range(1 << 30, 0, -(100 << 20)))
    monkeypatch.setattr("support.fake_cuda.FakeDevice.free_memory", lambda self: next(free))
    _, engine, _ = build()
    assert sum(context.is_alive for context in engine.contexts) == 1, "each takes 100 MiB of 1024 / 8"


def test_a_step_that_would_allocate_is_not_captured() -> None:
    backend, engine, device = build()
    engine.allocates = True
    cache = backend.new_cache(1)
    for _ in range(4):
        backend.step(cache, 0, StepInput(np.array([[1, 2]]), np.array([0]), np.array([[0]])), False)
    assert (device.graphs, device.launches, backend.num_graphs) == (0, 0, 0)
