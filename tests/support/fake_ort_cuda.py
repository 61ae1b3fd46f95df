"""onnxruntime as if it had a CUDA provider that captures runs: computes on the CPU, and refuses or punishes
with wrong numbers what the provider does.

Read in onnxruntime's sources (cuda_execution_provider.cc, cuda_graph.cc, inference_session.cc): a session
with `enable_cuda_graph` captures a run under its `gpu_graph_id` (0 where none is given) after two more runs
of the same inputs, in the thread that asks for it; a later run of that number in that thread is replayed with
the addresses and shapes of the capture, whatever is bound; -1 captures and replays nothing.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
Bound = dict[str, tuple[Any, ...]]


class FakeOrt:
    """The module. `refusal` is what a session that should capture is refused with; `on_host` says which
    inputs the graph reads in host memory; `stale`: an operator on the CPU computes with lengths, which
    replays do not see; `failing`: what the n-th run of a session, and every later one with a number, raises.
    """

    SessionOptions, RunOptions = onnxruntime.SessionOptions, onnxruntime.RunOptions
    __version__ = onnxruntime.__version__

    def __init__(
        self,
        refusal: str | None = None,
        on_host: Callable[[str], bool] = lambda name: False,
        stale: bool = False,
        failing: tuple[int, str] | None = None,
    ) -> None:
        self.refusal, self.on_host, self.stale, self.failing = refusal, on_host, stale, failing
        self.providers: list[tuple[str, dict[str, str]]] = []
        self.sessions: list[FakeSession] = []
        self.indices: Counter[int] = Counter()
        self.live: list[tuple[weakref.ref[Any], int, int]] = []
        self.busy = Lock()
        self.OrtValue = FakeValues(self)

    def InferenceSession(
        self, graph: Any, options: Any, providers: list[Any], enable_fallback: int
    ) -> FakeSession:
        assert enable_fallback == 0
        (name, own), *_ = providers
        assert name == CUDA
        self.providers.append((name, dict(own)))
        if self.refusal and own.get("enable_cuda_graph") == "1":
            raise RuntimeError(self.refusal)
        session = FakeSession(self, graph, options, own)
        self.sessions.append(session)
        return session

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Work of the provider: in another thread at the same time it would break a capture."""
        assert self.busy.acquire(blocking=False), "two threads on the GPU while a step may be captured"
        try:
            yield
        finally:
            self.busy.release()

    def check_live(self, address: int, num_bytes: int) -> None:
        self.live = [(value, start, end) for value, start, end in self.live if value() is not None]
        assert any(start <= address and address + num_bytes <= end for _, start, end in self.live), (
            "a replay of memory that was given back"
        )

    @property
    def step(self) -> FakeSession:
        """The session of the step graph: the first one."""
        return self.sessions[0]


class FakeValues:
    """onnxruntime.OrtValue, on the host whatever the device."""

    def __init__(self, ort: FakeOrt) -> None:
        self._ort = ort

    def ortvalue_from_shape_and_type(self, shape: Any, dtype: Any, device: str, index: int) -> Any:
        assert device == "cuda"
        return self._note(onnxruntime.OrtValue.ortvalue_from_numpy(np.full(shape, 77, dtype)), index)

    def ortvalue_from_numpy(self, array: np.ndarray, device: str, index: int) -> Any:
        assert device == "cuda"
        return self._note(onnxruntime.OrtValue.ortvalue_from_numpy(array.copy()), index)

    def _note(self, value: Any, index: int) -> Any:
        self._ort.indices[index] += 1
        start = value.data_ptr()
        size = (
            int(np.prod(value.shape()))
            * {"double": 8, "int64": 8, "float": 4, "float16": 2}[value.data_type()[7:-1]]
        )
        self._ort.live.append((weakref.ref(value), start, start + size))
        return value


class FakeBinding:
    """What is bound: address, type and shape of each name."""

    def __init__(self, ort: FakeOrt) -> None:
        self.inputs: Bound = {}
        self.outputs: Bound = {}
        self.arrays: dict[str, np.ndarray] = {}
        self._ort = ort

    def bind_input(self, name: str, device: str, index: int, dtype: Any, shape: Any, address: int) -> None:
        if device == "cuda":
            self._ort.indices[index] += 1
        self.inputs[name] = (dtype, tuple(shape), address)

    def bind_output(self, name: str, device: str, index: int, dtype: Any, shape: Any, address: int) -> None:
        if device == "cuda":
            self._ort.indices[index] += 1
        self.outputs[name] = (dtype, tuple(shape), address)

    def bind_cpu_input(self, name: str, array: np.ndarray) -> None:
        self.arrays[name] = array


class FakeSession:
    """A session. `numbers` has what each run was: its number, and how it went."""

    def __init__(self, ort: FakeOrt, graph: Any, options: Any, own: dict[str, str]) -> None:
        self._ort, self.captures = ort, own.get("enable_cuda_graph") == "1"
        self._real = onnxruntime.InferenceSession(graph, options, providers=[CPU])
        self._kept: dict[tuple[int, int], tuple[Bound, Bound, np.ndarray]] = {}
        self.numbers: list[tuple[int, str]] = []
        self.threads: set[int] = set()
        self.sizes: set[tuple[int, int]] = set()  # slots and predictions of captured steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def get_providers(self) -> list[str]:
        return [CUDA, CPU]

    def get_provider_graph_assignment_info(self) -> list[Any]:
        return []

    def get_input_memory_infos(self) -> list[Any]:
        return [self._info(tensor.name) for tensor in self._real.get_inputs()]

    def get_output_memory_infos(self) -> list[Any]:
        return [self._info(tensor.name) for tensor in self._real.get_outputs()]

    def _info(self, name: str) -> Any:
        return SimpleNamespace(name="Cpu" if self._ort.on_host(name) else "Cuda")

    def io_binding(self) -> FakeBinding:
        return FakeBinding(self._ort)

    def run_with_iobinding(self, io: FakeBinding, options: Any = None) -> None:
        with self._ort.alone():
            self._run(io, options)

    def _run(self, io: FakeBinding, options: Any) -> None:
        if not self.captures:
            self._compute(io.inputs, io.outputs, io.arrays)
            return
        self.threads.add(get_ident())
        assert options is not None, "a run without a number is captured under 0, and replayed for every other"
        number = int(options.get_run_config_entry("gpu_graph_id"))
        assert number != 0
        if number == -1:
            self.numbers.append((number, "plain"))
            self._compute(io.inputs, io.outputs, io.arrays)
            return
        if self._ort.failing and len(self.numbers) + 1 >= self._ort.failing[0]:
            raise RuntimeError(self._ort.failing[1])
        key = (get_ident(), number)
        if key not in self._kept:
            self.numbers.append((number, "captured"))
            self.sizes.add((io.inputs["input_ids"][1][1], io.inputs["output_index"][1][1]))
            for _ in range(3):
                self._compute(io.inputs, io.outputs, io.arrays)
            self._kept[key] = (dict(io.inputs), dict(io.outputs), _read(*io.inputs["kv_length"]).copy())
            return
        self.numbers.append((number, "replayed"))
        inputs, outputs, lengths = self._kept[key]
        for dtype, shape, address in (*inputs.values(), *outputs.values()):
            self._ort.check_live(address, int(np.prod(shape)) * np.dtype(dtype).itemsize)
        if self._ort.stale:
            inputs = inputs | {"kv_length": (np.int64, lengths.shape, lengths.ctypes.data)}
        self._compute(inputs, outputs, {})

    def _compute(self, inputs: Bound, outputs: Bound, arrays: dict[str, np.ndarray]) -> None:
        binding = self._real.io_binding()
        for name, (dtype, shape, address) in inputs.items():
            binding.bind_input(name, "cpu", 0, dtype, shape, address)
        for name, array in arrays.items():
            binding.bind_cpu_input(name, array)
        for name, (dtype, shape, address) in outputs.items():
            binding.bind_output(name, "cpu", 0, dtype, shape, address)
        self._real.run_with_iobinding(binding)


def _read(dtype: Any, shape: tuple[int, ...], address: int) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype).reshape(shape)
