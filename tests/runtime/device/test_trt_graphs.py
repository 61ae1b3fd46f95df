"""Captured steps of the TensorRT backend over a fake GPU: whose they are, how many, and which are none."""

from __future__ import annotations

import numpy as np
import pytest
from support.fake_trt import BLOCK, CAPACITY, build


def test_a_captured_step_belongs_to_its_rows_and_memory() -> None:
    backend, engine, device = build()
    one, two = backend.new_cache(2), backend.new_cache(2)
    ids, index = np.array([[4, 5]]), np.array([[1]])
    for cache in (one, two):
        for first in (0, 1):
            for _ in range(3):
                backend.step(cache, first, ids + first, np.array([0]), index, False)
    assert device.graphs == 4
    assert len({c.addresses["past_key_values.0.key"] for c in engine.contexts}) == 4
    for cache in (one, two):
        keys = device.view(cache.memory.addresses[0], (2, 2, CAPACITY, 4), np.float32)
        assert keys[:2, 0, :2, 0].tolist() == [[4, 5], [5, 6]]


def test_captured_steps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mars_export.runtime.device.trt.MOST_GRAPHS", 3)
    backend, _, device = build()
    cache = backend.new_cache(3)
    for rows in (1, 2, 3):
        for slots in (1, BLOCK) if rows < 3 else (1, BLOCK, 1):
            for _ in range(2):
                ids, index = np.full((rows, slots), 2), np.zeros((rows, 1), np.int64)
                backend.step(cache, 0, ids, np.zeros(rows, np.int64), index, False)
    assert backend.num_graphs == 3
    assert device.forgotten == 3


def test_a_step_that_would_allocate_is_not_captured() -> None:
    backend, engine, device = build()
    engine.allocates = True
    cache = backend.new_cache(1)
    for _ in range(4):
        backend.step(cache, 0, np.array([[1, 2]]), np.array([0]), np.array([[0]]), False)
    assert (device.graphs, device.launches, backend.num_graphs) == (0, 0, 0)
