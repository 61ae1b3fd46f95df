"""The tensors that a step of an ONNX Runtime session reads and writes, bound once by address. Knows names, no
meaning of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..memory import Memory

LARGEST_SPARE, MOST_SPARE = 256, 256  # numbers of a tensor that is kept for its shape's return, and tensors


class StepInput(NamedTuple):
    """The inputs of a step but its KV rows, by their names in the graph: int64 [rows, slots], [rows] and
    [rows, predictions].
    """

    input_ids: np.ndarray
    kv_length: np.ndarray
    output_index: np.ndarray


class Binding:
    """One IO binding, and the memory of everything it names but the KV rows, which belong to the cache.

    `places`: where each tensor is read or written by the graph. ONNX Runtime copies what is bound elsewhere
    once, when it is bound, and would not see what is written there later.
    """

    def __init__(self, session: Any, places: Mapping[str, Memory]) -> None:
        self._session, self._places = session, places
        self._io = session.io_binding()
        self._tensors: dict[str, Any] = {}
        # Small memory of other shapes: the width of steps goes to and fro.
        self._spare: dict[tuple[str, tuple[int, ...]], Any] = {}

    def bind_rows(
        self,
        names: Sequence[tuple[str, str | None]],
        buffers: Sequence[Any],
        memory: Memory,
        dtype: np.dtype[Any],
        rows: int,
        offset: int,
    ) -> None:
        """Bind `rows` rows of KV tensors, `offset` bytes from their beginning, as inputs and, where named, as
        outputs.
        """
        shape = (rows, *buffers[0].shape[1:])
        for (past, present), buffer in zip(names, buffers, strict=True):
            self._io.bind_input(past, memory.device, memory.number, dtype, shape, buffer.address + offset)
            if present is not None:
                self._io.bind_output(
                    present, memory.device, memory.number, dtype, shape, buffer.address + offset
                )

    def write(self, name: str, value: np.ndarray) -> None:
        """An input. Binding takes far longer than copying a few ids: memory is written again as long as the
        shape stays.
        """
        tensor = self._tensors.get(name)
        if tensor is None or tensor.shape != value.shape:
            memory = self._places[name]
            tensor = self._memory(name, value.shape, value.dtype)
            tensor.write(value)
            self._io.bind_input(name, memory.device, memory.number, value.dtype, value.shape, tensor.address)
            self._tensors[name] = tensor
        else:
            tensor.write(value)

    def expect(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Memory for an output."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.shape != shape:
            memory = self._places[name]
            tensor = self._memory(name, shape, dtype)
            self._io.bind_output(name, memory.device, memory.number, dtype, shape, tensor.address)
            self._tensors[name] = tensor
        return tensor

    def _memory(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """For a tensor of another shape than the last one: what it had before in this shape, or new."""
        place = self._places[name]
        if prod(shape) > LARGEST_SPARE:
            return place.tensor(shape, dtype)
        if (name, shape) not in self._spare:
            if len(self._spare) >= MOST_SPARE:
                self._spare.clear()  # what is bound stays: `_tensors` has it
            self._spare[name, shape] = place.tensor(shape, dtype)
        return self._spare[name, shape]

    def run(self) -> None:
        self._session.run_with_iobinding(self._io)

    def take(self, name: str) -> np.ndarray:
        """An output, without a copy where it is in host memory: the next step gets other memory."""
        tensor = self._tensors.pop(name)
        self._spare.pop((name, tensor.shape), None)
        array: np.ndarray = tensor.take()
        return array
