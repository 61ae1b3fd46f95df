"""The paper's cache loop: whole blocks are committed, and sequences wait for each other at block
boundaries.
"""

from __future__ import annotations

from collections import abc
from operator import attrgetter

from ..errors import SessionError
from .backend import Backend, StepOutput, StepPlan
from .batch import error_boundary
from .limits import Limits
from .schedule import Schedule
from .sequence import Accepted, Predictions, Sequence

UNUSED = StepPlan(0, 0, 1)  # of a sequence that waits between two working ones; recognized by identity


def check_blocks(backend: Backend, seqs: abc.Sequence[Sequence], cache_block: int) -> None:
    """Raise SessionError for requests that this loop does not support."""
    if backend.max_slots is not None and cache_block > backend.max_slots:
        raise SessionError(
            f"a cache block of {cache_block} tokens does not fit a step of {backend.max_slots} slots;"
            " give a smaller one"
        )
    if any(seq.config.is_structured for seq in seqs):
        raise SessionError(
            "a grammar needs cursor commit: forced tokens may go beyond a block; leave commit as it is"
        )
    if any(seq.config.exact for seq in seqs):
        raise SessionError(
            "exact mode needs cursor commit: block commit feeds accepted tokens against a frozen cache and"
            " verifies none; leave commit as it is, or give a tau"
        )


class BlockSchedule(Schedule):
    """The same loop with another commit: cursors move when whole blocks are full.

    The cache holds whole blocks of `cache_block` tokens. An inner step feeds the accepted tokens of the
    current block and then masks, at most up to the block's end, against the frozen cache. When every
    sequence's block is full, one more forward writes the blocks into the cache; its last output predicts the
    first token of the next block.
    """

    def __init__(self, backend: Backend, block: int, mask_id: int, limits: Limits, cache_block: int) -> None:
        super().__init__(backend, block, mask_id, limits)
        self._cache_block = cache_block
        # By sequence: the last commit's prediction of the block's first token, and the plans of the step.
        self._first: dict[int, Predictions] = {}
        self._plans: dict[int, StepPlan] = {}

    def step(self) -> list[Accepted]:
        return sorted(super().step(), key=attrgetter("seq"))

    def decoding(self, accepted: list[Accepted]) -> list[list[Sequence]]:
        """All sequences if their blocks are full, to commit them; else those whose block is not."""
        seqs = self.batch.decoding
        if all(map(self._is_full, seqs)):
            accepted += [seq.finish("capacity") for seq in seqs if self._length(seq) == 0]
            self.batch.drop_finished(accepted)
            seqs = self.batch.decoding
            self._plans = {seq.index: StepPlan(seq.num_pending) for seq in seqs}
            return [seqs] if seqs else []
        self._plans = {seq.index: self._inner_plan(seq) for seq in seqs if not self._is_full(seq)}
        for seq in seqs:
            # One-token mode at the start of a block: the commit predicted its token.
            if seq.index in self._plans and not self._plans[seq.index].slots:
                del self._plans[seq.index]
                with error_boundary([seq], accepted):
                    accepted += filter(None, [seq.accept(self._first[seq.index])])
        # Neighbouring sequences run together. The cursor of a sequence that waits does not move.
        working = [i for i, seq in enumerate(seqs) if seq.index in self._plans]
        return [seqs[working[0] : working[-1] + 1]] if working else []

    def decode_plans(self, seqs: abc.Sequence[Sequence]) -> list[StepPlan]:
        return [self._plans.get(seq.index, UNUSED) for seq in seqs]

    def first_plan(self, seq: Sequence) -> StepPlan:
        return StepPlan(seq.num_pending)

    def commit_and_accept(self, seq: Sequence, output: StepOutput, i: int, plan: StepPlan) -> Accepted | None:
        if plan is UNUSED:
            return None
        predictions = Predictions.of(output, i, plan.outputs, seq.config)
        seq.stats.forwards += 1
        if self.reader is not None or self._is_full(seq):  # a commit, whose prediction is kept
            seq.cursor += plan.pending
            self._first[seq.index] = predictions
            return None
        return seq.accept(predictions if plan.pending else self._first[seq.index].then(predictions))

    def _length(self, seq: Sequence) -> int:
        """Tokens of the sequence's current block; at the end of the context fewer, even none."""
        return min(self._cache_block, self.backend.max_capacity - seq.cursor)

    def _is_full(self, seq: Sequence) -> bool:
        return seq.num_pending >= max(1, self._length(seq))

    def _inner_plan(self, seq: Sequence) -> StepPlan:
        pending = seq.num_pending
        return StepPlan(pending, 0, min(seq.max_masks(self.block), max(1, self._length(seq) - pending) - 1))
