"""ONNX Runtime on the CPU: lack of memory, and bindings that end with their memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mars_export import GenerationConfig, Limits, Session, SessionError
from mars_export.runtime import machine
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.decode.backend import Cache, StepInput, StepOutput
from mars_export.runtime.decode.schedule import Schedule, run
from mars_export.runtime.decode.sequence import Sequence
from mars_export.runtime.device.kv import KvRows
from mars_export.runtime.device.ort.backend import OrtBackend

OVERFLOW = 200
LONG, OTHER = ([(7 * i + k) % 250 for i in range(300)] for k in (0, 50))
Backends = Callable[..., OrtBackend]


@pytest.fixture(scope="module")
def backends(graphs: Callable[[str, str], Path]) -> Backends:
    def opened(layout: str = "in-place") -> OrtBackend:
        bundle = open_bundle(graphs(layout, "fp32"))
        return OrtBackend(bundle, bundle.manifest.variants[0], threads=1)

    return opened


def step(backend: OrtBackend, cache_rows: KvRows, start: int = 0, tokens: int = 5) -> np.ndarray:
    """One forward of two rows over `tokens` ids from entry `start` on."""
    ids = np.array([LONG[start : start + tokens], OTHER[start : start + tokens]])
    index = np.tile(np.arange(tokens), (2, 1))
    cache_rows.reserve(start + tokens, (start, start))
    return backend.step(cache_rows, 0, StepInput(ids, np.array([start, start]), index), False).confidence


def shortage(*_: Any, **__: Any) -> None:
    """What a machine without memory would do."""
    raise MemoryError("Unable to allocate 1.00 GiB")


@pytest.mark.parametrize("layout", ["in-place", "appended"])
def test_rows_survive_memory_that_cannot_be_had(
    layout: str, backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backends(layout)
    rows, untouched = backend.new_cache(2), backend.new_cache(2)
    with monkeypatch.context() as short:
        short.setattr("mmap.mmap", shortage)
        with pytest.raises(
            SessionError, match="the KV entries of 1 row.* of 128 take 0 MB .Unable to allocate"
        ):
            rows.reserve(1)
    assert (rows.capacity, rows.buffers) == (0, []), "a fresh cache is fresh again"
    expected = [step(backend, untouched, start) for start in range(0, 300, 5)]
    for i, start in enumerate(range(0, 125, 5)):
        assert (step(backend, rows, start) == expected[i]).all()
    buffers, binding = list(rows.buffers), rows.binding
    with monkeypatch.context() as short:
        short.setattr("mmap.mmap", shortage)
        with pytest.raises(SessionError, match="not enough memory: .* of 256 .* shorten the prompt"):
            rows.reserve(129)
    assert (rows.capacity, rows.buffers, rows.binding) == (128, buffers, binding), "nothing was let go"
    assert (step(backend, rows, 120) == expected[24]).all()
    for i, start in enumerate(range(125, 300, 5)):
        assert (step(backend, rows, start) == expected[25 + i]).all()
    assert rows.capacity > 128


def test_rows_that_grow_keep_their_entries_and_others_are_zero() -> None:
    rows = KvRows(2, 3, 2, 4, np.dtype("f4"))
    rows.reserve(1)
    for buffer in rows.buffers:
        buffer[:] = np.arange(1, buffer.size + 1).reshape(buffer.shape)
    before = [buffer.copy() for buffer in rows.buffers]
    rows.reserve(129, [7, 0])
    assert rows.capacity == 256
    for old, buffer in zip(before, rows.buffers, strict=True):
        assert np.array_equal(buffer[0, :, :7], old[0, :, :7])
        assert not buffer[0, :, 7:].any() and not buffer[1:].any()


@pytest.mark.parametrize("capacity", [1, 3000])
def test_a_released_row_is_zero(capacity: int) -> None:
    """Rows without whole pages, and with some."""
    rows = KvRows(2, 3, 1, 5, np.dtype("<f4"))
    rows.reserve(capacity)
    for buffer in rows.buffers:
        buffer[:] = np.nan
    rows.release(1)
    assert all(np.isnan(buffer[[0, 2]]).all() and not buffer[1].any() for buffer in rows.buffers)


def test_numbers_that_are_none_stay_with_their_sequence(
    backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in a row's entries, as after an overflow, would fail the next sequence: 0 * NaN is NaN."""
    backend, forward = backends(), OrtBackend.step

    def overflowing(
        self: OrtBackend, cache: Cache, first: int, inputs: StepInput, want_logits: bool
    ) -> StepOutput:
        output = forward(self, cache, first, inputs, want_logits)
        if OVERFLOW in inputs.input_ids[0]:
            output.confidence[0] = np.nan
            for buffer in cache.buffers:  # type: ignore[attr-defined]
                buffer[first, :, inputs.kv_length[0] :] = np.nan
        return output

    monkeypatch.setattr(OrtBackend, "step", overflowing)
    config = GenerationConfig(max_new_tokens=4, eos_ids=())
    alone, bad, good = (Sequence(i, ids, config, ()) for i, ids in enumerate(([3], [1, 2, OVERFLOW], [3])))
    assert not [e for events in run(Schedule(backend, 1, 0, Limits(1)), [alone]) for e in events if e.error]
    failed = [
        e.seq for events in run(Schedule(backend, 1, 0, Limits(1)), [bad, good]) for e in events if e.error
    ]
    assert failed == [bad.index]
    assert good.tokens == alone.tokens


def test_kv_memory_grows_where_there_is_room(backends: Backends, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = backends().new_cache(2)
    rows.reserve(100)
    monkeypatch.setattr(machine, "available", lambda: 1000)
    with pytest.raises(SessionError, match="KV memory of 1 row.* MB, 0 MB are free; shorten the prompt"):
        rows.reserve(1000)
    assert rows.capacity == 128


def test_a_model_is_opened_where_there_is_room(
    graphs: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available", lambda: 1000)
    with pytest.raises(SessionError, match="opening this model takes .* 0 MB are free; use a smaller model"):
        Session.open(graphs("in-place", "fp32"))


@pytest.mark.parametrize("layout", ["in-place", "appended"])
@pytest.mark.parametrize("failing", ["write", "expect", "run"])
def test_a_step_that_fails_half_bound_leaves_no_binding(
    failing: str, layout: str, backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backends(layout)
    rows, untouched = backend.new_cache(2), backend.new_cache(2)
    expected = [step(backend, untouched, start) for start in (0, 5)]
    assert (step(backend, rows) == expected[0]).all()
    for error, seen in (
        (RuntimeError("Failed to allocate memory for requested buffer"), SessionError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ):

        def fail(*_: Any, error: BaseException = error) -> None:
            raise error

        with monkeypatch.context() as broken:
            broken.setattr(f"mars_export.runtime.device.ort.backend.Binding.{failing}", fail)
            with pytest.raises(
                seen, match="not enough memory: run fewer rows" if seen is SessionError else None
            ) as caught:
                step(backend, rows, 5)
            assert getattr(caught.value, "code", None) == ("out_of_memory" if seen is SessionError else None)
        assert rows.binding is None
    assert (step(backend, rows, 5) == expected[1]).all()
