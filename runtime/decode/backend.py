"""The interface between the decoding loop and a device: KV rows, and one forward of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from .config import GenerationConfig
from .speculation.drafts import NONE, DraftTokens

GROWTH = 128  # entries: capacity grows in multiples of this


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The inputs of one row in a step, from its cursor on: `pending` tokens, `draft_tokens`, `masks`.

    The outputs are those of the last pending token, of every draft token and of every mask, in this order.
    """

    pending: int
    draft_tokens: int = 0
    masks: int = 0

    @property
    def slots(self) -> int:
        return self.pending + self.draft_tokens + self.masks

    @property
    def outputs(self) -> int:
        return 1 + self.draft_tokens + self.masks


class StepInput(NamedTuple):
    """The inputs of a step without its KV rows, by their names in the graph: int64 [rows, slots], [rows] and
    [rows, outputs].
    """

    input_ids: np.ndarray
    kv_length: np.ndarray
    output_index: np.ndarray


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Predictions of one step, all [rows, outputs]: token_ids int64, the confidences float32; logits float32
    [rows, outputs, vocab]; topk_ids int64 and topk_logprobs float32 [rows, outputs, k], best first.

    The last `mtp_drafts` outputs belong to no slot: they are the MTP layer's predictions of the tokens after
    the last one that greedy decoding accepts. `is_prepared` is False if the step first prepared its shape, so
    that its time says nothing about later ones.
    """

    token_ids: np.ndarray
    confidence: np.ndarray
    margin: np.ndarray | None = None
    entropy: np.ndarray | None = None
    logits: np.ndarray | None = None
    topk_ids: np.ndarray | None = None
    topk_logprobs: np.ndarray | None = None
    mtp_drafts: int = 0
    is_prepared: bool = True


@dataclass(frozen=True, slots=True)
class Predictions:
    """Consecutive predictions for one sequence, the first for its next unknown position; arrays of one
    length. A slot at position p, mask or not, gives the prediction for p + 1.

    `confidences` are in the metric of the sequence's config, `probabilities` always probabilities. The last
    `mtp_drafts` are the MTP layer's, as in StepOutput.
    """

    token_ids: np.ndarray
    confidences: np.ndarray
    probabilities: np.ndarray
    logits: np.ndarray | None
    topk_ids: np.ndarray | None = None
    topk_logprobs: np.ndarray | None = None
    mtp_drafts: int = 0

    @classmethod
    def of(cls, output: StepOutput, at: int, count: int, config: GenerationConfig) -> Predictions:
        """The first `count` predictions of batch row `at`, with confidences in the metric of `config`. In
        exact mode, which verifies them, also the MTP layer's.
        """
        mtp_drafts = output.mtp_drafts if config.exact else 0

        def part(array: np.ndarray | None) -> Any:
            if array is None or not mtp_drafts:
                return None if array is None else array[at, :count]
            return np.concatenate([array[at, :count], array[at, -mtp_drafts:]])

        metrics = {"margin": output.margin, "entropy": output.entropy}
        confidences = part(metrics.get(config.metric, output.confidence))
        assert confidences is not None, f"{config.metric} was not exported: the session checks this first"
        topk = part(output.topk_ids), part(output.topk_logprobs)
        ids, logits = part(output.token_ids), part(output.logits)
        return cls(ids, confidences, part(output.confidence), logits, *topk, mtp_drafts)

    def mtp_draft(self, token_ids: Sequence[int], num_verified: int) -> DraftTokens:
        """The MTP layer's draft tokens if the step gave `token_ids`; none if greedy decoding gives others."""
        count = len(token_ids)
        ids, shares = (array[-self.mtp_drafts :] for array in (self.token_ids, self.probabilities))
        is_own = count == num_verified + 1 and list(token_ids) == self.token_ids[:count].tolist()
        if not is_own or np.isnan(shares).any():  # no self-check covers the layer
            return NONE
        return DraftTokens(tuple(ids.tolist()), tuple(shares.tolist()))


class Cache(Protocol):
    """KV memory of some rows. Rows are contiguous, so that a step can run on any neighbouring rows."""

    @property
    def capacity(self) -> int:
        """Entries that each row can hold now."""

    def reserve(self, capacity: int, lengths: Sequence[int] = ()) -> None:
        """Make room for at least `capacity` entries a row, keeping the first `lengths[i]` entries of row i
        and none of the other rows.
        """

    def shrink(self, capacity: int, lengths: Sequence[int]) -> None:
        """Reduce the room to about `capacity` entries a row, keeping the same entries as `reserve`."""

    def release(self, row: int) -> None:
        """Zero a row's entries, and free their memory where the host can."""

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` entries of row `source` over row `target`."""

    @property
    def entry_bytes(self) -> int:
        """Size of one entry of one row."""

    def copy_bytes(self, row: int, length: int) -> int | None:
        """Size of a copy of the first `length` entries of a row; None if its states have more tokens."""

    def save(self, row: int, length: int) -> Any:
        """Copy the first `length` entries of a row, and its states. The copy outlives this cache."""

    def load(self, row: int, saved: Any, length: int) -> None:
        """Write the first `length` entries of a saved copy into `row`, which has room for the whole copy.
        With recurrent states a copy is always loaded as a whole.
        """

    def upload(self, arrays: Sequence[np.ndarray]) -> Any:
        """Make a copy for `load` from host arrays [kv_heads, length, head_dim], one for each KV tensor."""

    def download(self, saved: Any) -> list[np.ndarray]:
        """A saved copy as such host arrays."""


class Backend(Protocol):
    """A variant of a bundle, loaded on a device.

    outputs: names of the prediction outputs of the graph
    max_slots, max_outputs: slots, and predictions of each row, of one step at most; None for no limit
    max_capacity: maximum number of entries of a row
    reproducible_slots: from this many slots on, an entry has the same bits whatever step of any row writes
        it; None if they depend on the step's size: then only steps of equal size write equal entries
    """

    outputs: tuple[str, ...]
    max_slots: int | None
    max_outputs: int | None
    max_capacity: int
    reproducible_slots: int | None

    def new_cache(self, num_rows: int) -> Cache: ...

    def step(self, cache: Cache, first: int, inputs: StepInput, want_logits: bool) -> StepOutput:
        """Run one forward on the cache rows first, first + 1, ... Writes KV entries kv_length .. kv_length +
        slots - 1 of each row; the caller has reserved them.
        """


def bucket(length: int, capacity: int) -> int:
    """The capacity to grow to from `capacity` so that `length` entries fit: at least a quarter more, in steps
    of GROWTH.
    """
    target = max(length, capacity + capacity // 4)
    return -(-target // GROWTH) * GROWTH
