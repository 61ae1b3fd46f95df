"""What a session binds: memory comes back with its shape, and what was given away stays its taker's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mars_export.runtime.device.ort import backend as module
from mars_export.runtime.device.ort.backend import MAX_SPARE_BYTES, Binding

INT64, FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)


class Io:
    """Notes what is bound: name -> (shape, address)."""

    def __init__(self) -> None:
        self.bound: dict[str, tuple[tuple[int, ...], int]] = {}

    def bind_input(self, name: str, _d: str, _i: int, _t: Any, shape: tuple[int, ...], address: int) -> None:
        self.bound[name] = (shape, address)

    bind_output = bind_input


@pytest.fixture
def io() -> Io:
    return Io()


@pytest.fixture
def binding(io: Io) -> Binding:
    return Binding(SimpleNamespace(io_binding=lambda: io))


def ids(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int64)[None]


def test_memory_of_a_width_comes_back_with_it_and_is_bound_again(binding: Binding, io: Io) -> None:
    addresses = {}
    for width in (1, 8, 1, 3, 8):
        binding.write("input_ids", ids(width, width))
        shape, address = io.bound["input_ids"]
        assert shape == (1, width)
        assert addresses.setdefault(width, address) == address
        assert (binding._tensors["input_ids"] == ids(width, width)).all()
        result = binding.expect("token_ids", (1, width), INT64)
        assert io.bound["token_ids"] == ((1, width), result.ctypes.data)
    assert len(set(addresses.values())) == 3


def test_what_was_taken_is_never_written_again(binding: Binding) -> None:
    first = binding.expect("logits", (1, 5), FLOAT32)
    first[:] = 1
    taken = binding.take("logits")
    for width in (5, 3, 5):
        other = binding.expect("logits", (1, width), FLOAT32)
        other[:] = 0
    assert (taken == 1).all()


def test_large_memory_is_not_kept_and_little_of_the_small(
    binding: Binding, monkeypatch: pytest.MonkeyPatch
) -> None:
    binding.write("input_ids", ids(MAX_SPARE_BYTES + 1))
    assert not binding._spare
    monkeypatch.setattr(module, "MAX_SPARE", 4)
    for width in range(1, 20):
        binding.write("input_ids", ids(width))
        assert len(binding._spare) <= 4
        assert (binding._tensors["input_ids"] == ids(width)).all()
