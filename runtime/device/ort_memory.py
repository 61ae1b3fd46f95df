"""Memory of ONNX Runtime's devices: arrays that never leave the GPU, and copies between them done there.

ONNX Runtime copies whole tensors only, between host and device; what a KV cache needs besides (more capacity,
a row over a row, a step's entries behind their cursors) are graphs of one operator for each KV tensor, bound
by address. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .memory import Tensor

ELEMENT_TYPES = {
    np.dtype(np.float32): 1,
    np.dtype(np.int64): 7,
    np.dtype(np.float16): 10,
}  # as ONNX numbers them


class OrtTensor:
    """An OrtValue: a fixed address on its device, written from the host and read to the host."""

    def __init__(self, value: Any) -> None:
        self.value, self.address, self.shape = value, int(value.data_ptr()), tuple(value.shape())

    def write(self, value: np.ndarray) -> None:
        self.value.update_inplace(np.ascontiguousarray(value))

    def read(self) -> np.ndarray:
        return np.array(self.value.numpy())  # on a CPU, numpy() is a view

    def take(self) -> np.ndarray:
        return self.read()


class OrtMemory:
    """Memory on the `device` of that `number`. `ort` is the onnxruntime module, `provider` its name for what
    computes there.
    """

    def __init__(self, ort: Any, device: str, provider: str, number: int = 0) -> None:
        self._ort, self.device, self.number = ort, device, number
        self._provider = provider if device == "cpu" else (provider, {"device_id": str(number)})
        self._copies: dict[tuple[str, int, np.dtype[Any]], Any] = {}

    def tensor(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> OrtTensor:
        values = self._ort.OrtValue
        return OrtTensor(values.ortvalue_from_shape_and_type(list(shape), dtype, self.device, self.number))

    def zeros(self, count: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[OrtTensor]:
        rows, heads, entries, dim = shape
        tensors = self.new(count, shape, dtype)
        one = OrtTensor(
            self._ort.OrtValue.ortvalue_from_numpy(
                np.zeros((rows, heads, 1, dim), dtype), self.device, self.number
            )
        )
        addresses = [(one.address, tensor.address) for tensor in tensors]
        self._pad(addresses, (rows * heads, dim), (rows * heads, entries * dim), dtype)
        return tensors

    def new(self, count: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[OrtTensor]:
        """KV tensors; what they hold is not known."""
        return [self.tensor(shape, dtype) for _ in range(count)]

    def move(self, buffers: Sequence[OrtTensor], source: int, target: int, length: int) -> None:  # noqa: ARG002
        # The whole row, which is one run of memory; behind `length` there is nothing that anyone reads.
        _, heads, capacity, dim = buffers[0].shape
        row = heads * capacity * dim
        step = row * self._dtype(buffers).itemsize
        addresses = [(buffer.address + source * step, buffer.address + target * step) for buffer in buffers]
        self._pad(addresses, (1, row), (1, row), self._dtype(buffers))

    def save(self, buffers: Sequence[OrtTensor], row: int, length: int) -> list[OrtTensor]:
        _, heads, capacity, dim = buffers[0].shape
        dtype = self._dtype(buffers)
        saved = [self.tensor((heads, length, dim), dtype) for _ in buffers]
        at = row * heads * capacity * dim * dtype.itemsize
        addresses = [(buffer.address + at, copy.address) for buffer, copy in zip(buffers, saved, strict=True)]
        self._pad(addresses, (heads, capacity * dim), (heads, length * dim), dtype)
        return saved

    def load(
        self,
        buffers: Sequence[OrtTensor],
        row: int,
        saved: Sequence[OrtTensor],
        length: int,  # noqa: ARG002
    ) -> None:
        # All that was saved, and zeros behind it: each run of a row is one run of what was saved.
        _, heads, capacity, dim = buffers[0].shape
        dtype = self._dtype(buffers)
        at = row * heads * capacity * dim * dtype.itemsize
        addresses = [(copy.address, buffer.address + at) for buffer, copy in zip(buffers, saved, strict=True)]
        self._pad(addresses, (heads, saved[0].shape[1] * dim), (heads, capacity * dim), dtype)

    def bring(self, arrays: Sequence[np.ndarray]) -> list[OrtTensor]:
        make = self._ort.OrtValue.ortvalue_from_numpy
        return [OrtTensor(make(np.ascontiguousarray(array), self.device, self.number)) for array in arrays]

    def fetch(self, saved: Sequence[OrtTensor]) -> list[np.ndarray]:
        return [tensor.read() for tensor in saved]

    def place(
        self, buffers: Sequence[OrtTensor], first: int, kv_length: np.ndarray, new: Sequence[Tensor]
    ) -> None:
        dtype, rows = self._dtype(buffers), new[0].shape[0]
        shape = (rows, *buffers[0].shape[1:])
        step = int(np.prod(shape[1:])) * dtype.itemsize
        run, binding = self._graph("TensorScatter", len(buffers), dtype)
        binding.bind_cpu_input("shared", np.ascontiguousarray(kv_length, np.int64))
        for i, (buffer, entries) in enumerate(zip(buffers, new, strict=True)):
            address = buffer.address + first * step
            binding.bind_input(f"in{i}", self.device, self.number, dtype, shape, address)
            binding.bind_input(f"new{i}", self.device, self.number, dtype, entries.shape, entries.address)
            binding.bind_output(f"out{i}", self.device, self.number, dtype, shape, address)
        run(binding)

    def widen(self, buffers: Sequence[OrtTensor], capacity: int) -> list[OrtTensor]:
        dtype = self._dtype(buffers)
        rows, heads, entries, dim = buffers[0].shape
        wider = self.new(len(buffers), (rows, heads, capacity, dim), dtype)
        addresses = [(old.address, new.address) for old, new in zip(buffers, wider, strict=True)]
        self._pad(addresses, (rows * heads, entries * dim), (rows * heads, capacity * dim), dtype)
        return wider

    def _pad(
        self,
        addresses: list[tuple[int, int]],
        old: tuple[int, int],
        new: tuple[int, int],
        dtype: np.dtype[Any],
    ) -> None:
        """Copy [runs, length] from one address of each pair to the other: the beginning of each run where the
        other's are shorter, else all of it with zeros behind.
        """
        run, binding = self._graph("Pad", len(addresses), dtype)
        binding.bind_cpu_input("shared", np.array([0, 0, 0, new[1] - old[1]]))
        for i, (source, target) in enumerate(addresses):
            binding.bind_input(f"in{i}", self.device, self.number, dtype, old, source)
            binding.bind_output(f"out{i}", self.device, self.number, dtype, new, target)
        run(binding)

    def _graph(self, operator: str, count: int, dtype: np.dtype[Any]) -> tuple[Any, Any]:
        """What runs a graph of `count` equal operators, and a new binding for it."""
        key = (operator, count, dtype)
        if key not in self._copies:
            options = self._ort.SessionOptions()
            options.log_severity_level = 3
            options.intra_op_num_threads = 1  # the device copies
            graph = copies(operator, count, ELEMENT_TYPES[dtype])
            self._copies[key] = self._ort.InferenceSession(
                graph, options, providers=[self._provider], enable_fallback=0
            )
        session = self._copies[key]
        return session.run_with_iobinding, session.io_binding()

    @staticmethod
    def _dtype(buffers: Sequence[OrtTensor]) -> np.dtype[Any]:
        return {f"tensor({name})": np.dtype(kind) for name, kind in (("float", "f4"), ("float16", "f2"))}[
            buffers[0].value.data_type()
        ]


def copies(operator: str, count: int, element_type: int) -> bytes:
    """An ONNX model of `count` nodes: `Pad`(in, shared) or `TensorScatter`(in, new, shared) -> out, shapes
    left open.

    Written field by field, as protobuf numbers them, because running a bundle does not need the onnx package.
    """
    rank = 2 if operator == "Pad" else 4
    nodes, inputs, outputs = b"", _value("shared", 7, 1), b""
    for i in range(count):
        names = [f"in{i}", "shared"] if operator == "Pad" else [f"in{i}", f"new{i}", "shared"]
        node = b"".join(_text(1, name) for name in names) + _text(2, f"out{i}") + _text(4, operator)
        nodes += _bytes(1, node)
        inputs += b"".join(_value(name, element_type, rank) for name in names[:-1])
        outputs += _value(f"out{i}", element_type, rank, field=12)
    graph = nodes + _text(2, operator) + inputs + outputs
    opset = _text(1, "") + _number(2, 24)
    return _number(1, 11) + _bytes(7, graph) + _bytes(8, opset)


def _value(name: str, element_type: int, rank: int, field: int = 11) -> bytes:
    tensor = _number(1, element_type) + _bytes(2, _bytes(1, b"") * rank)  # a shape of `rank` unknown sizes
    return _bytes(field, _text(1, name) + _bytes(2, _bytes(1, tensor)))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _varint(value: int) -> bytes:
    low = bytearray()
    while value > 0x7F:
        low.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*low, value])
