"""The ONNX Runtime backend: lack of memory, bindings that end with their memory, and KV rows on a device.

A device's memory is tested with `cpu` as the device, on a fake GPU whose addresses are those of host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.agreement import LOOPS, PROMPTS, config
from support.fake_cuda import FakeDevice

from mars_export import Session, SessionError
from mars_export.runtime import machine
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.decode.backend import StepInput
from mars_export.runtime.device.cuda import Device, find_gpu
from mars_export.runtime.device.kv import KvRows
from mars_export.runtime.device.memory import HostMemory
from mars_export.runtime.device.ort.backend import OrtBackend
from mars_export.runtime.device.ort.cuda_memory import CudaMemory

LONG, OTHER = ([(7 * i + k) % 250 for i in range(300)] for k in (0, 50))
Backends = Callable[..., OrtBackend]


@pytest.fixture(scope="module")
def backends(graphs: Callable[[str, str], Path]) -> Backends:
    def opened(layout: str = "in-place", precision: str = "fp32", memory: Any = None) -> OrtBackend:
        bundle = open_bundle(graphs(layout, precision))
        v = bundle.manifest.variants[0]
        return OrtBackend(bundle.path / v.file, v, bundle.manifest.model, threads=1, memory=memory)

    return opened


def device_memory() -> CudaMemory:
    return CudaMemory(FakeDevice(size=1 << 24), "cpu")  # type: ignore[arg-type]


NO_GPU = gpu if isinstance(gpu := find_gpu(), str) else None
ON_GPU = pytest.param(
    lambda: CudaMemory(Device()),
    marks=[pytest.mark.gpu, pytest.mark.skipif(NO_GPU is not None, reason=f"{NO_GPU}")],
)


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
    rows = KvRows(HostMemory(), 2, 3, 2, 4, np.dtype("f4"))
    rows.reserve(1)
    for buffer in rows.buffers:
        buffer.array[:] = np.arange(1, buffer.array.size + 1).reshape(buffer.shape)
    before = [buffer.read() for buffer in rows.buffers]
    rows.reserve(129, [7, 0])
    assert rows.capacity == 256
    for old, buffer in zip(before, rows.buffers, strict=True):
        assert np.array_equal(buffer.array[0, :, :7], old[0, :, :7])
        assert not buffer.array[0, :, 7:].any() and not buffer.array[1:].any()


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
            broken.setattr(f"mars_export.runtime.device.ort.binding.Binding.{failing}", fail)
            with pytest.raises(
                seen, match="not enough memory: run fewer rows" if seen is SessionError else None
            ) as caught:
                step(backend, rows, 5)
            assert getattr(caught.value, "code", None) == ("out_of_memory" if seen is SessionError else None)
        assert rows.binding is None
    assert (step(backend, rows, 5) == expected[1]).all()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("layout", ["in-place", "appended"])
def test_rows_on_a_device_give_the_tokens_of_rows_on_the_host(
    layout: str, precision: str, backends: Backends, graphs: Callable[[str, str], Path]
) -> None:
    bundle = open_bundle(graphs(layout, precision))
    host, device = (
        Session(bundle, bundle.manifest.variants[0], backends(layout, precision, memory))
        for memory in (None, device_memory())
    )
    prompts = [*PROMPTS, LONG]
    sampled = config(0.3, temperature=0.8, seed=3)
    for settings in (config(1.0), config(0.3), sampled, config(0.3, metric="margin")):
        for one, other in zip(
            host.generate_batch(prompts, settings), device.generate_batch(prompts, settings), strict=True
        ):
            assert one.token_ids == other.token_ids
            assert one.confidences == other.confidences
    for cache_block in LOOPS.values():
        one, other = (s.generate_batch(prompts, config(0.3), cache_block=cache_block) for s in (host, device))
        assert [c.token_ids for c in one] == [c.token_ids for c in other]


def test_a_device_binds_once_and_crosses_with_little(
    backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backends(memory=device_memory())
    rows = backend.new_cache(2)
    step(backend, rows)
    binding, crossed = rows.binding, []
    addresses = [buffer.address for buffer in rows.buffers]
    write = CudaMemory.write
    monkeypatch.setattr(CudaMemory, "write", lambda m, a, v: (crossed.append(v.nbytes), write(m, a, v)))
    for start in (5, 10, 15):
        step(backend, rows, start)
    assert rows.binding is binding
    assert [buffer.address for buffer in rows.buffers] == addresses
    assert crossed == [2 * 5 * 8, 2 * 8, 2 * 5 * 8] * 3, "ids, lengths and indices, and nothing else"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("device", [device_memory, ON_GPU], ids=["fake", "gpu"])
def test_rows_on_a_device_grow_move_and_take_entries(device: Callable[[], CudaMemory], dtype: str) -> None:
    host = HostMemory()
    random, kind = np.random.default_rng(0), np.dtype(dtype)
    values, new = (random.normal(size=shape).astype(kind) for shape in ((3, 2, 128, 8), (2, 2, 3, 8)))
    results = []
    for memory in (host, device()):
        buffers = memory.zeros(4, (3, 2, 128, 8), kind)
        assert not any(buffer.read().any() for buffer in buffers)
        for buffer in buffers:
            buffer.write(values)
        buffers = memory.widen(buffers, 256, (128, 5, 128))
        entries = [memory.tensor(new.shape, kind) for _ in buffers]
        for tensor in entries:
            tensor.write(new)
        memory.place(buffers, 1, np.array([130, 7]), entries)
        memory.move(buffers, 2, 0, 256)
        saved = memory.save(buffers, 1, 133)  # a row's beginning, cut out of it and put into another one
        memory.load(buffers, 2, saved, 133)
        if memory is host:
            for buffer in buffers:
                buffer.array[2, :, 133:] = 0
        results.append([buffer.read() for buffer in buffers])
    for one, other in zip(*results, strict=True):
        assert (one == other).all()


class Placed:
    """A session of which it is said that the graph reads and writes KV, or some of it, on another device."""

    def __init__(self, session: Any, elsewhere: Callable[[str], bool]) -> None:
        self._session, self._elsewhere = session, elsewhere

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def _infos(self, tensors: Any) -> list[Any]:
        return [SimpleNamespace(name="Cuda" if self._elsewhere(t.name) else "Cpu") for t in tensors]

    def get_input_memory_infos(self) -> list[Any]:
        return self._infos(self._session.get_inputs())

    def get_output_memory_infos(self) -> list[Any]:
        return self._infos(self._session.get_outputs())


@pytest.mark.parametrize(
    ("elsewhere", "must_rebind"),
    [
        (lambda name: name == "kv_length", False),
        (lambda name: name.startswith("past_key_values.1"), True),
        (lambda name: "key" in name, True),
    ],
)
def test_what_the_graph_reads_elsewhere_stays_elsewhere(
    elsewhere: Callable[[str], bool], must_rebind: bool, backends: Backends
) -> None:
    backend, memory = backends(), device_memory()
    expected = [step(backend, backend.new_cache(2), 0)]
    backend._session = Placed(backend._session, elsewhere)
    backend._find_places(memory)
    assert backend._must_rebind is must_rebind
    assert isinstance(backend._memory, HostMemory if must_rebind else CudaMemory)
    assert isinstance(backend._places["kv_length"], HostMemory) == elsewhere("kv_length")
    rows = backend.new_cache(2)
    assert (step(backend, rows) == expected[0]).all()
