"""What the decoding loop asks of a device: KV rows and one forward. Each backend is one file that implements
this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

GROWTH = 128  # entries: capacity grows in multiples of this


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Predictions of one step, all [rows, outputs]: token_ids int64, the confidences float32; logits float32
    [rows, outputs, vocab]; topk_ids int64 and topk_logprobs float32 [rows, outputs, k], best first.
    """

    token_ids: np.ndarray
    confidence: np.ndarray
    margin: np.ndarray | None = None
    entropy: np.ndarray | None = None
    logits: np.ndarray | None = None
    topk_ids: np.ndarray | None = None
    topk_logprobs: np.ndarray | None = None


class Cache(Protocol):
    """KV memory of some rows. Rows are contiguous, so that a step can run on any run of neighbours."""

    @property
    def capacity(self) -> int:
        """Entries that each row can hold now."""
        ...

    def reserve(self, capacity: int) -> None:
        """Make room for at least `capacity` entries a row, keeping what is there."""
        ...

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` entries of row `source` over row `target`."""
        ...

    @property
    def entry_bytes(self) -> int:
        """What one entry of one row takes."""
        ...

    def save(self, row: int, length: int) -> Any:
        """A copy of the first `length` entries of a row, of nothing behind them; it outlives this cache."""
        ...

    def load(self, row: int, saved: Any, length: int) -> None:
        """Make the first `length` entries of what was saved those of `row`; all of it has room there."""
        ...

    def bring(self, arrays: Sequence[np.ndarray]) -> Any:
        """What `load` takes, of host arrays [kv_heads, length, head_dim], one of each KV tensor."""
        ...

    def fetch(self, saved: Any) -> list[np.ndarray]:
        """What was saved, as such host arrays."""
        ...


class Backend(Protocol):
    """A variant of a bundle, loaded on a device."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the prediction outputs of the graph."""
        ...

    @property
    def max_slots(self) -> int | None:
        """Most slots of one step, None for no limit."""
        ...

    @property
    def max_outputs(self) -> int | None:
        """Most predictions of each row in one step, None for no limit."""
        ...

    @property
    def max_capacity(self) -> int:
        """Most entries a row can ever hold."""
        ...

    @property
    def firm_slots(self) -> int | None:
        """From so many slots on, an entry has the same bits whatever step of any row writes it.

        None where they depend on the step's size: then only equal steps write equal entries.
        """
        ...

    @property
    def kv_device(self) -> str:
        """Where KV rows are between two steps: `cpu` or `cuda`."""
        ...

    def new_cache(self, num_rows: int) -> Cache: ...

    def step(
        self,
        cache: Cache,
        first: int,
        input_ids: np.ndarray,
        kv_length: np.ndarray,
        output_index: np.ndarray,
        want_logits: bool,
    ) -> StepOutput:
        """Run one forward on the cache rows first, first + 1, ...

        input_ids int64 [rows, slots], kv_length int64 [rows], output_index int64 [rows, outputs]. Writes KV
        entries kv_length .. kv_length + slots - 1 of each row; the caller has reserved them.
        """
        ...


def bucket(needed: int, present: int) -> int:
    """The capacity to grow to from `present` when `needed` entries are wanted: at least a quarter more, in
    steps of GROWTH.
    """
    target = max(needed, present + present // 4)
    return -(-target // GROWTH) * GROWTH
