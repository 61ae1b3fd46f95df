"""Step inputs and results on a GPU, packed so that each direction takes one copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from .pool import ALIGNMENT

if TYPE_CHECKING:
    from ..decode.backend import StepInput
    from .cuda import Device


def smallest_fit(sizes: Iterable[int], size: int, limit: int | None = None) -> int:
    """The smallest of `sizes` that holds `size` and is at most `limit`; `size` itself if there is none."""
    return min((n for n in sizes if n >= size and (limit is None or n <= limit)), default=size)


def padded(array: np.ndarray, rows: int, columns: int) -> np.ndarray:
    if array.shape == (rows, columns):
        return array
    wide = np.zeros((rows, columns), np.int64)
    wide[: array.shape[0], : array.shape[1]] = array
    return wide


IDS = ("token_ids", "topk_ids")  # the outputs that are int64


class StepIO:
    """Inputs and results on the device, and their mirror in page-locked host memory. The results of a step
    are packed by its size, so that no unused memory is copied.

    `rows`, `slots`, `outputs`: the most of a step. `widths`: values for each prediction of an output, by
    default 1. Logits are large and seldom read: they have no mirror, and are copied by themselves.
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
        # The ids come last, so that unused memory after those of a step is not sent.
        sizes = {"kv_length": rows * 8, "output_index": rows * outputs * 8, "input_ids": rows * slots * 8}
        self._input_places, input_bytes = _packed(sizes)
        _, result_bytes = self._places((rows, outputs))
        self._host_inputs, self._host_results = device.pinned(input_bytes), device.pinned(result_bytes)
        self._inputs, self._results = device.allocate(input_bytes), device.allocate(result_bytes)
        logits = rows * outputs * widths.get("logits", 1) * 4 if "logits" in names else 0
        self._logits = device.allocate(logits) if logits else 0

    def free(self) -> None:
        """Free the memory on the device."""
        for address in filter(None, (self._inputs, self._results, self._logits)):
            self._device.free(address)

    def addresses(self, rows: int, outputs: int) -> dict[str, int]:
        """The addresses of the inputs and results of a step with `rows` rows and `outputs` predictions."""
        addresses = {name: self._inputs + at for name, at in self._input_places.items()}
        addresses |= {name: self._results + at for name, at in self._places((rows, outputs))[0].items()}
        return addresses | ({"logits": self._logits} if self._logits else {})

    def _places(self, shape: tuple[int, int]) -> tuple[dict[str, int], int]:
        """The offsets of results in their block, and its size."""
        count = shape[0] * shape[1]
        names = [name for name in self._names if name != "logits"]
        return _packed({n: count * self._widths.get(n, 1) * (8 if n in IDS else 4) for n in names})

    def send(self, inputs: StepInput) -> None:
        """Copy the inputs to the device. The arrays may be changed at once; another `send` must wait for
        `synchronize`.
        """
        for name, array in inputs._asdict().items():
            at = self._input_places[name]
            self._host_inputs[at : at + array.size * 8].view(np.int64)[:] = array.reshape(-1)
        end = self._input_places["input_ids"] + inputs.input_ids.size * 8
        self._device.upload(self._inputs, self._host_inputs[:end])

    def fetch(self, shape: tuple[int, int], want_logits: bool) -> dict[str, np.ndarray]:
        """The results of a step with `shape` rows and predictions; waits for the stream.

        TensorRT's TopK does not order equal values. If the engine has top-k outputs, equal ones are ordered
        here by id.
        """
        places, size = self._places(shape)
        self._device.download(self._host_results[:size], self._results)
        arrays: dict[str, np.ndarray] = {}
        if want_logits and "logits" in self._names:
            arrays["logits"] = np.empty((*shape, self._widths["logits"]), np.float32)
            self._device.download(arrays["logits"], self._logits)
        self._device.synchronize()
        for name, at in places.items():
            wide = (*shape, self._widths[name]) if name in self._widths else shape
            kind = np.dtype(np.int64 if name in IDS else np.float32)
            size = int(np.prod(wide)) * kind.itemsize
            arrays[name] = self._host_results[at : at + size].view(kind).reshape(wide).copy()
        if "topk_ids" in arrays and "topk_logprobs" in arrays:
            _break_ties(arrays)
        return arrays


def _break_ties(arrays: dict[str, np.ndarray]) -> None:
    """Order candidates of equal log-probability by their ids; the first one is the prediction."""
    ids, values = arrays["topk_ids"], arrays["topk_logprobs"]
    for place in np.argwhere((values[..., 1:] == values[..., :-1]).any(-1)):
        row = tuple(place)
        ids[row] = ids[row][np.lexsort((ids[row], -values[row]))]
        if values[row][0] == values[row][1]:
            arrays["token_ids"][row] = ids[row][0]


def _packed(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Offsets of tensors of these sizes in one block, and the size of the block."""
    places, end = {}, 0
    for name, size in sizes.items():
        places[name] = end
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return places, end
