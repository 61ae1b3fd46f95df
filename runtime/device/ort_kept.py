"""Memory of a device whose KV tensors come again at the same addresses: captured steps write there."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np

from .ort_memory import OrtMemory, OrtTensor

MOST_IDLE = 4  # caches' worth of KV tensors that wait for the next cache of their shape
LEAST = 512  # entries of a row

Shape = tuple[tuple[int, ...], np.dtype[Any]]


def doubled(needed: int, present: int) -> int:
    """The capacity to grow to: few sizes, because each has captured steps of its own."""
    entries = max(LEAST, present)
    while entries < needed:
        entries *= 2
    return entries


class KeptMemory(OrtMemory):
    """What a cache gave up serves the next one of the same shape. For one thread, but for what gives up."""

    def __init__(self, ort: Any, device: str, provider: str, number: int = 0) -> None:
        super().__init__(ort, device, provider, number)
        self._idle: dict[Shape, list[Any]] = {}
        # Caches end in any thread, in the middle of anything.
        self._given_up: deque[tuple[Shape, Any]] = deque()

    def new(self, count: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[OrtTensor]:
        self._take_back(MOST_IDLE * count)
        idle = self._idle.get((shape, dtype), [])
        if len(idle) >= count:
            values, idle[-count:] = idle[-count:], []
            tensors = [OrtTensor(value) for value in values]
        else:
            try:
                tensors = super().new(count, shape, dtype)
            except Exception:  # onnxruntime's own: what is idle makes room
                self._idle.clear()
                tensors = super().new(count, shape, dtype)
        tensors.sort(key=lambda tensor: tensor.address)  # they end in any order, and serve again in this one
        for tensor in tensors:
            weakref.finalize(tensor, self._given_up.append, ((shape, dtype), tensor.value)).atexit = False
        return tensors

    def _take_back(self, most: int) -> None:
        while self._given_up:
            shape, value = self._given_up.popleft()
            self._idle[shape] = [*self._idle.pop(shape, []), value]  # the latest shape last
        while sum(map(len, self._idle.values())) > most:
            oldest = next(iter(self._idle))
            del self._idle[oldest][:1]  # all of them may have been taken
            if not self._idle[oldest]:
                del self._idle[oldest]
