"""What a step of an engine reads and gives, KV entries apart: packed, so that one copy each way carries it.
Knows names and sizes, no meaning of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from .memory import ALIGNMENT

if TYPE_CHECKING:
    from .cuda import Device

IDS = ("token_ids", "topk_ids")  # the outputs that are int64
# The ids come last: what is behind those of this step is not sent.
INPUTS = ("kv_length", "output_index", "input_ids")


class StepIO:
    """Inputs and results on the device, where `addresses` say, and their mirror in page-locked host
    memory. The results of a step lie packed by its size, so that what is copied is what there is.

    `rows`, `slots`, `outputs`: the most of a step; `widths`: values for each prediction of an output, 1
    where it is not named. Logits are large and seldom wanted: they have no mirror, and a copy of their own.
    """

    def __init__(
        self,
        device: Device,
        rows: int,
        slots: int,
        outputs: int,
        names: tuple[str, ...],
        widths: Mapping[str, int],
    ) -> None:
        self._device, self._names, self._widths = device, names, widths
        sizes = {"kv_length": rows * 8, "output_index": rows * outputs * 8, "input_ids": rows * slots * 8}
        results = {n: rows * outputs * widths.get(n, 1) * (8 if n in IDS else 4) for n in names}
        logits = results.pop("logits", 0)
        self._given, given = _packed(sizes)
        _, got = _packed(results)
        self._here, self._there = device.pinned(given), device.pinned(got)
        self._first, self._last = device.allocate(given), device.allocate(got)
        self._logits = device.allocate(logits) if logits else 0

    def addresses(self, rows: int, outputs: int) -> dict[str, int]:
        """Where a step of so many rows and predictions finds its inputs and puts its results."""
        places = {name: self._first + at for name, at in self._given.items()}
        places |= {name: self._last + at for name, at in self._places((rows, outputs))[0].items()}
        return places | ({"logits": self._logits} if self._logits else {})

    def _places(self, shape: tuple[int, int]) -> tuple[dict[str, int], int]:
        """Where results lie in their block, and its size."""
        count = shape[0] * shape[1]
        names = [name for name in self._names if name != "logits"]
        return _packed({n: count * self._widths.get(n, 1) * (8 if n in IDS else 4) for n in names})

    def send(self, input_ids: np.ndarray, kv_length: np.ndarray, output_index: np.ndarray) -> None:
        """Put the inputs on the stream; the arrays may be used again at once, but not this, before
        `synchronize`.
        """
        for name, array in zip(INPUTS, (kv_length, output_index, input_ids), strict=True):
            at = self._given[name]
            self._here[at : at + array.size * 8].view(np.int64)[:] = array.reshape(-1)
        self._device.upload(self._first, self._here[: self._given["input_ids"] + input_ids.size * 8])

    def fetch(self, shape: tuple[int, int], want_logits: bool) -> dict[str, np.ndarray]:
        """Results of a step of so many rows and predictions; waits for the stream. TensorRT's TopK has no
        order among equal values: where the engine has the likeliest tokens, the lowest id of equal ones
        wins here.
        """
        places, size = self._places(shape)
        self._device.download(self._there[:size], self._last)
        arrays: dict[str, np.ndarray] = {}
        if want_logits and "logits" in self._names:
            arrays["logits"] = np.empty((*shape, self._widths["logits"]), np.float32)
            self._device.download(arrays["logits"], self._logits)
        self._device.synchronize()
        for name, at in places.items():
            wide = (*shape, self._widths[name]) if name in self._widths else shape
            kind = np.dtype(np.int64 if name in IDS else np.float32)
            size = int(np.prod(wide)) * kind.itemsize
            arrays[name] = self._there[at : at + size].view(kind).reshape(wide).copy()
        if "topk_ids" in arrays and "topk_logprobs" in arrays:
            _break_ties(arrays)
        return arrays


def _break_ties(arrays: dict[str, np.ndarray]) -> None:
    """Candidates of one log-probability in the order of their ids, and the first of them as the
    prediction.
    """
    ids, values = arrays["topk_ids"], arrays["topk_logprobs"]
    for place in np.argwhere((values[..., 1:] == values[..., :-1]).any(-1)):
        row = tuple(place)
        ids[row] = ids[row][np.lexsort((ids[row], -values[row]))]
        if values[row][0] == values[row][1]:
            arrays["token_ids"][row] = ids[row][0]


def _packed(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where each of some tensors begins in one block, and the size of that."""
    places, end = {}, 0
    for name, size in sizes.items():
        places[name] = end
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return places, end
