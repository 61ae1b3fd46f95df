"""The active sequences and their KV memory: one forward over neighbouring sequences."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter

import numpy as np

from ..errors import SessionError
from .backend import Backend, StepInput, StepOutput, StepPlan, bucket
from .budget import SLOTS
from .event import Event
from .sequence import Sequence


class NoMemory(Exception):
    """Memory for the entries of `seqs` is short; the others fit."""

    def __init__(self, seqs: abc.Sequence[Sequence], error: BaseException) -> None:
        super().__init__(str(error))
        self.seqs, self.error = seqs, error


SHRINK = 4  # capacity is reduced to what the sequences need if it is this many times as large


class Batch:
    """The sequences that run, in neighbouring KV rows: first the decoding ones, then those whose prompts are
    being read, shorter ones before longer ones. Row i of the cache belongs to `active[i]`.

    outcomes: what the sequences gave, and how they ended, until it is taken
    """

    def __init__(self, backend: Backend, num_rows: int, mask_id: int, *, releases_rows: bool = False) -> None:
        self.backend, self.num_rows, self.mask_id = backend, num_rows, mask_id
        self._releases_rows = releases_rows  # the memory of rows that are not used
        self.cache = backend.new_cache(num_rows)
        self.active: list[Sequence] = []
        self.outcomes: list[Event] = []
        self.num_decoding = 0
        self.step_seconds, self.step_slots = 0.0, 0  # of the last step

    @property
    def decoding(self) -> list[Sequence]:
        return self.active[: self.num_decoding]

    @property
    def prefilling(self) -> list[Sequence]:
        """The sequences whose prompts are being read."""
        return self.active[self.num_decoding :]

    @property
    def lengths(self) -> list[int]:
        """The number of final KV entries of each row."""
        return [seq.cursor for seq in self.active]

    @contextmanager
    def ending(self, seqs: abc.Sequence[Sequence]) -> Iterator[None]:
        """If the body raises, `seqs` end, and no others.

        It catches BaseException, because a panic of a Rust library is not an Exception.
        """
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except NoMemory as short:
            self.outcomes += [seq.fail(short.error) for seq in short.seqs]
        except BaseException as error:
            for seq in seqs:
                self.outcomes.append(seq.fail(error))
                self.cache.release(self.active.index(seq))  # NaN in it would fail the row's next sequence

    def take_outcomes(self) -> list[Event]:
        taken, self.outcomes = self.outcomes, []
        return taken

    def forward(self, seqs: abc.Sequence[Sequence], plans: abc.Sequence[StepPlan]) -> StepOutput:
        """Run one step on neighbouring active sequences with these plans.

        Output 0 of a sequence belongs to its last pending token; then come its draft tokens and its masks.
        The output of a slot predicts the token at the next position.
        """
        for seq in seqs:
            seq.stats.starts()
            if seq.on_forward is not None:
                seq.on_forward()
        slots = max([plan.slots for plan in plans])
        outputs = max([plan.outputs for plan in plans])
        # Lists, and one array of each at the end: after a forward the processor's caches are cold, and each
        # call of numpy costs microseconds.
        input_ids, output_index, cursors = [], [], []
        for seq, plan in zip(seqs, plans, strict=True):
            pending, cursor = plan.pending, seq.cursor
            tokens = seq.tokens[cursor : cursor + pending]
            if plan.draft_tokens:
                tokens += seq.draft_tokens.token_ids[: plan.draft_tokens]
            input_ids.append(tokens + [self.mask_id] * (slots - len(tokens)))
            slot_index = list(range(pending - 1, plan.slots))
            output_index.append(slot_index + [0] * (outputs - len(slot_index)))
            cursors.append(cursor)
        try:
            self.cache.reserve(max(cursors) + slots, self.lengths)
        except SessionError as error:  # the other sequences take their next step
            raise NoMemory([s for s in seqs if s.cursor + slots > self.cache.capacity], error) from error
        want_logits = any(seq.wants_logits for seq in seqs)
        inputs = StepInput(*(np.array(v, np.int64) for v in (input_ids, cursors, output_index)))
        first, began = self.active.index(seqs[0]), perf_counter()
        output = self.backend.step(self.cache, first, inputs, want_logits)
        self.step_seconds, self.step_slots = perf_counter() - began, slots
        return output

    def room(self, seq: Sequence) -> int:
        """Slots of a step after the sequence's pending tokens; below 0 if these do not fit."""
        pending = seq.num_pending
        room = self.backend.max_capacity - seq.cursor - pending
        if self.backend.max_slots is not None:
            room = min(room, self.backend.max_slots - pending)
        if self.backend.max_outputs is not None:
            room = min(room, self.backend.max_outputs - 1)
        return room

    def fits(self, seq: Sequence) -> bool:
        """Whether the sequence's pending tokens fit in the context."""
        return len(seq.tokens) <= self.backend.max_capacity

    def lookup(self, seq: Sequence, chunk: int, max_entries: int | None = None) -> None:
        """Load the beginning of the sequence's prompt from the prefix cache.

        `max_entries`: entries to which a saved prefix may widen the sequences, None for any number.
        """
        if seq.prefix_handle is not None:
            row, capacity = self.active.index(seq), self.backend.max_capacity
            seq.cursor = seq.num_reproducible = seq.prefix_handle.lookup(
                self.cache, row, seq.tokens, chunk, capacity, max_entries, self.lengths
            )
            seq.stats.cached_tokens = seq.cursor

    def store(self, seq: Sequence) -> None:
        """Offer the sequence's final entries to the prefix cache."""
        if seq.prefix_handle is not None:
            row = self.active.index(seq)
            seq.prefix_handle.store(self.cache, row, seq.tokens, seq.num_reproducible)

    def add(self, seq: Sequence) -> None:
        """Add a sequence before the others whose prompts are being read."""
        self.active.append(seq)
        for i in range(len(self.active) - 1, self.num_decoding, -1):
            self.move(i - 1, i)
        self.active[self.num_decoding] = seq
        self._release(self.num_decoding)

    def start_decoding(self, seq: Sequence) -> None:
        """The prompt of `seq`, the first that is being read, has been read."""
        self.num_decoding += 1
        self.store(seq)  # now: the next prompt may begin alike

    def drop_finished(self) -> None:
        """Remove sequences that have ended, and close the gaps; decoding sequences stay first."""
        active, before = self.active, len(self.active)
        while ended := [i for i, seq in enumerate(active) if seq.finish_reason is not None]:
            i = ended[-1]
            self.store(active[i])
            if i < self.num_decoding:
                self.num_decoding -= 1
                self.move(self.num_decoding, i)
                i = self.num_decoding
            for later in range(i + 1, len(active)):
                self.move(later, later - 1)
            active.pop()
            self._release(len(active))
        if 0 < len(active) < before:
            self._shrink()

    def move(self, source: int, target: int) -> None:
        """Move the sequence at `source` to `target`, with its final entries unless it has ended. It ends if
        these cannot be copied.
        """
        if source != target:
            seq = self.active[target] = self.active[source]
            self._release(target)
            if seq.finish_reason is None:
                with self.ending([seq]):
                    self.cache.move(source, target, seq.cursor)

    def _release(self, row: int) -> None:
        if self._releases_rows:
            self.cache.release(row)

    def _shrink(self) -> None:
        """Reduce a capacity that only sequences needed that have ended: it makes every step slower."""
        capacity = bucket(max(len(seq.tokens) for seq in self.active) + SLOTS, 0)
        if self.cache.capacity >= SHRINK * capacity:
            with suppress(Exception):  # most likely a lack of memory for the copy; the rows stay as they were
                self.cache.shrink(capacity, self.lengths)

    def free(self) -> None:
        """Free the KV memory; no sequence is active."""
        if self.cache.capacity:
            self.cache = self.backend.new_cache(self.num_rows)
