"""ONNX Runtime on CUDA, of its CPU provider and a fake GPU: captured runs are replayed as they were bound."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from mars_export.runtime.device import cuda
from mars_export.runtime.device.ort import cuda_backend, library
from support.fake_cuda import FakeDevice

Bound = dict[tuple[str, str], tuple[Any, ...]]


class FakeBinding:
    """Notes what is bound: ("bind_input" or "bind_output", name) -> the other arguments."""

    def __init__(self) -> None:
        self.bound: Bound = {}

    def bind_input(self, name: str, *place: Any) -> None:
        self.bound["bind_input", name] = place

    def bind_output(self, name: str, *place: Any) -> None:
        self.bound["bind_output", name] = place


class FakeSession:
    """A session on the CPU that captures. As the real one, a replay ignores the binding that it is given, and
    a capturing run is several runs. `runs`: the kind of each, and its slots.
    """

    def __init__(self, session: Any, device: FakeDevice, nodes: tuple[tuple[str, str], ...]) -> None:
        self._session, self._device, self._nodes = session, device, nodes
        self.captured: dict[tuple[int, int], Bound] = {}  # by id and thread
        self.released: list[int] = []
        self.runs: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def get_providers(self) -> list[str]:
        return ["CUDAExecutionProvider"]

    def get_provider_graph_assignment_info(self) -> list[Any]:
        named = [SimpleNamespace(op_type=operator, name=name) for operator, name in self._nodes]
        return [SimpleNamespace(ep_name="CPUExecutionProvider", get_nodes=lambda: named)]

    def io_binding(self) -> FakeBinding:
        return FakeBinding()

    def run_with_iobinding(self, binding: FakeBinding, options: Any) -> None:
        graph_id = int(options.get_run_config_entry("gpu_graph_id"))
        bound, kind, times = dict(binding.bound), "eager", 1
        if graph_id >= 0:
            key = graph_id, threading.get_ident()
            kind, times = ("replay", 1) if key in self.captured else ("capture", 2)
            bound = self.captured.setdefault(key, bound)
        self.runs.append((kind, bound["bind_input", "input_ids"][3][1]))
        self._device._flush()
        io = self._session.io_binding()
        for (method, name), place in bound.items():
            getattr(io, method)(name, *place)
        for _ in range(times):
            self._session.run_with_iobinding(io)

    def release_captured_graph(self, graph_id: int) -> None:
        self.released.append(graph_id)
        self.captured = {key: bound for key, bound in self.captured.items() if key[0] != graph_id}


class FakeCuda:
    """What a test sees: sessions and devices in the order of their creation, and the provider's options."""

    def __init__(self) -> None:
        self.sessions: list[FakeSession] = []
        self.devices: list[FakeDevice] = []
        self.options: list[dict[str, str]] = []


def pretend(monkeypatch: pytest.MonkeyPatch, *nodes: tuple[str, str], size: int = 1 << 26) -> FakeCuda:
    """Open sessions on `cuda` as if it were there, with these (operator, name) left to the CPU."""
    fake, real = FakeCuda(), onnxruntime.InferenceSession

    def device(*_: Any) -> FakeDevice:
        fake.devices.append(FakeDevice(size))
        return fake.devices[-1]

    def opened(graph: Any, options: Any, providers: Any, **rest: Any) -> Any:
        fake.options.extend(settings for _, settings in providers)
        session = real(graph, options, providers=["CPUExecutionProvider"], **rest)
        fake.sessions.append(FakeSession(session, fake.devices[-1], nodes))
        return fake.sessions[-1]

    module = SimpleNamespace(
        InferenceSession=opened, SessionOptions=onnxruntime.SessionOptions, RunOptions=onnxruntime.RunOptions
    )
    load = library.load
    on_gpu = (module, "CUDAExecutionProvider")
    monkeypatch.setattr(library, "load", lambda device: on_gpu if device == "cuda" else load(device))
    monkeypatch.setattr(cuda, "Device", device)
    monkeypatch.setattr(cuda_backend, "PLACE", "cpu")
    return fake
