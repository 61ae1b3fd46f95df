"""The paper's cache loop: whole blocks are committed, and sequences wait for each other at block
boundaries.
"""

from __future__ import annotations

from collections import abc

from ..errors import SessionError
from .backend import Backend, StepOutput, StepPlan
from .batch import error_boundary
from .schedule import Limits, Schedule
from .sequence import Accepted, Predictions, Sequence

UNUSED = StepPlan(0, 0, 1)  # of a sequence that waits between two working ones; recognized by identity


def check_blocks(backend: Backend, seqs: abc.Sequence[Sequence], cache_block: int) -> None:
    """Raise SessionError for what this loop cannot do."""
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
        # By sequence: the last commit's prediction of the block's first token.
        self._first: dict[int, Predictions] = {}

    def _length(self, seq: Sequence) -> int:
        """Tokens of the sequence's current block; at the end of the context fewer, even none."""
        return min(self._cache_block, self.backend.max_capacity - seq.cursor)

    def _is_full(self, seq: Sequence) -> bool:
        return seq.num_pending >= max(1, self._length(seq))

    def _first_plan(self, seq: Sequence) -> StepPlan:
        return StepPlan(seq.num_pending)

    def _finish_prompt(self, seq: Sequence, output: StepOutput, i: int, plan: StepPlan) -> None:
        """A commit: pending tokens are final, and the next prediction is kept."""
        seq.cursor += plan.pending
        seq.stats.forwards += 1
        self._first[seq.index] = Predictions.of(output, i, 1, seq.config.metric)

    def _decode(self, seqs: list[Sequence]) -> list[Accepted]:
        incomplete = [i for i, seq in enumerate(seqs) if not self._is_full(seq)]
        if not incomplete:
            return self._commit(seqs)
        plans = {i: self._inner_plan(seqs[i]) for i in incomplete}
        events: list[Accepted] = []
        for i in incomplete:
            if not plans[i].slots:  # one-token mode at the start of a block: the commit predicted its token
                with error_boundary([seqs[i]], events):
                    events += filter(None, [seqs[i].accept(self._first[seqs[i].index])])
        working = [i for i in incomplete if plans[i].slots]
        if working:
            # Neighbouring sequences run together. The cursor of a sequence that waits does not move.
            span = range(working[0], working[-1] + 1)
            span_plans = [plans[i] if i in working else UNUSED for i in span]
            events += self._run([seqs[i] for i in span], span_plans, self._accept_inner)
        return sorted(events, key=lambda event: event.seq)

    def _commit(self, seqs: list[Sequence]) -> list[Accepted]:
        """Write every full block into the cache. Rows whose context is full end."""
        events = [seq.finish("capacity") for seq in seqs if self._length(seq) == 0]
        self._drop_finished()
        if seqs := self._decoding():
            events += self._run(seqs, [StepPlan(seq.num_pending) for seq in seqs], self._finish_prompt)
        return events

    def _inner_plan(self, seq: Sequence) -> StepPlan:
        pending = seq.num_pending
        return StepPlan(pending, 0, min(seq.max_masks(self.block), max(1, self._length(seq) - pending) - 1))

    def _accept_inner(self, seq: Sequence, output: StepOutput, i: int, plan: StepPlan) -> Accepted | None:
        if plan is UNUSED:
            return None
        seq.stats.forwards += 1
        predictions = Predictions.of(output, i, plan.outputs, seq.config.metric)
        return seq.accept(predictions if plan.pending else self._first[seq.index].then(predictions))
