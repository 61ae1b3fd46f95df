"""Backends without a model: one whose KV entries are the tokens themselves, and one that records what another
is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mars_export.runtime.decode.backend import Backend, Cache, StepInput, StepOutput

MASK = 0  # of a fake; its other tokens are 1, 2, ...
Predict = Callable[[tuple[int, ...], int], tuple[int, float]]
"""(known prefix, number of masks after it) -> (token, confidence)"""


@dataclass(frozen=True, slots=True)
class Step:
    """The inputs of one forward."""

    first: int
    input_ids: np.ndarray
    kv_length: np.ndarray
    output_index: np.ndarray
    capacity: int

    @property
    def rows(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def slots(self) -> int:
        return int(self.input_ids.shape[1])


class FakeCache:
    """KV memory that holds tokens: -1 where nothing was ever written."""

    def __init__(self, num_rows: int) -> None:
        self.entries = np.full((num_rows, 0), -1, np.int64)
        self.moves: list[tuple[int, int, int]] = []

    @property
    def capacity(self) -> int:
        return int(self.entries.shape[1])

    def reserve(self, capacity: int, lengths: Sequence[int] = ()) -> None:
        """Growth keeps what it must, and no more."""
        if capacity > self.capacity:
            entries = np.full((len(self.entries), capacity), -1, np.int64)
            for row, length in enumerate(lengths):
                entries[row, :length] = self.entries[row, :length]
            self.entries = entries

    def shrink(self, capacity: int, lengths: Sequence[int]) -> None:
        self.entries, old = np.full((len(self.entries), capacity), -1, np.int64), self.entries
        for row, length in enumerate(lengths):
            self.entries[row, :length] = old[row, :length]

    def release(self, row: int) -> None:
        self.entries[row] = -1

    def move(self, source: int, target: int, length: int) -> None:
        self.moves.append((source, target, length))
        self.entries[target, :length] = self.entries[source, :length]

    @property
    def entry_bytes(self) -> int:
        return 8

    def copy_bytes(self, row: int, length: int) -> int | None:  # noqa: ARG002
        return length * self.entry_bytes

    def save(self, row: int, length: int) -> np.ndarray:
        assert (self.entries[row, :length] > MASK).all(), "only what is known may be saved"
        return self.entries[row, :length].copy()

    def load(self, row: int, saved: np.ndarray, length: int) -> None:
        assert len(saved) <= self.capacity, "the loop must reserve what is loaded"
        self.entries[row, :length] = saved[:length]

    def upload(self, arrays: np.ndarray) -> np.ndarray:
        return arrays

    def download(self, saved: np.ndarray) -> np.ndarray:
        return saved


class FakeBackend:
    """Predicts with `predict` from what its cache really holds, and fails when a wanted output would see a
    stale entry.
    """

    outputs: tuple[str, ...] = ("token_ids", "confidence")

    def __init__(
        self,
        predict: Predict,
        max_capacity: int = 10**6,
        max_slots: int | None = None,
        max_outputs: int | None = None,
    ) -> None:
        self.predict, self.max_capacity = predict, max_capacity
        self.max_slots, self.max_outputs = max_slots, max_outputs
        self.reproducible_slots: int | None = 1
        self.steps: list[Step] = []
        self.caches: list[FakeCache] = []

    def new_cache(self, num_rows: int) -> FakeCache:
        self.caches.append(FakeCache(num_rows))
        return self.caches[-1]

    def step(self, cache: Cache, first: int, inputs: StepInput, want_logits: bool) -> StepOutput:
        input_ids, kv_length, output_index = inputs
        assert isinstance(cache, FakeCache)
        assert not want_logits, "a fake has none"
        self.steps.append(Step(first, *(array.copy() for array in inputs), cache.capacity))
        slots = input_ids.shape[1]
        token_ids = np.zeros(output_index.shape, np.int64)
        confidence = np.zeros(output_index.shape, np.float32)
        for i, start in enumerate(kv_length.tolist()):
            assert start + slots <= cache.capacity, "the loop must reserve what a step writes"
            entries = cache.entries[first + i]
            entries[start : start + slots] = input_ids[i]
            for j, slot in enumerate(output_index[i].tolist()):
                token_ids[i, j], confidence[i, j] = self.predict(*_seen(entries[: start + slot + 1].tolist()))
        return StepOutput(token_ids, confidence)


def _seen(entries: list[int]) -> tuple[tuple[int, ...], int]:
    known = list(entries)
    while known and known[-1] == MASK:
        known.pop()
    assert MASK not in known, f"a rejected mask's entry is attended to: {entries}"
    assert -1 not in known, f"an entry that was never written is attended to: {entries}"
    return tuple(known), len(entries) - len(known)


class Recording:
    """Another backend, with a note of each step's inputs."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.outputs, self.max_capacity = backend.outputs, backend.max_capacity
        self.max_slots, self.max_outputs = backend.max_slots, backend.max_outputs
        self.reproducible_slots = backend.reproducible_slots
        self.steps: list[Step] = []

    def new_cache(self, num_rows: int) -> Cache:
        return self.backend.new_cache(num_rows)

    def step(self, cache: Cache, first: int, inputs: StepInput, want_logits: bool) -> StepOutput:
        self.steps.append(Step(first, *(array.copy() for array in inputs), cache.capacity))
        return self.backend.step(cache, first, inputs, want_logits)


def scripted(tokens: Sequence[int], confidences: Sequence[float], prompt_length: int) -> Predict:
    """Predicts `tokens` one after the other, whatever was seen; `confidences[n]` belongs to `tokens[n]`."""

    def predict(known: tuple[int, ...], masks: int) -> tuple[int, float]:
        at = len(known) + masks - prompt_length
        return (tokens[at], confidences[at]) if 0 <= at < len(tokens) else (1, 0.0)

    return predict
