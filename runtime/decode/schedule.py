"""The decoding loop: continuous batching, one step at a time."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from itertools import groupby

from .backend import Backend, StepOutput, StepPlan
from .batch import Batch, KvBudget, error_boundary
from .limits import Limits
from .prefill import Prefill
from .queue import Queue
from .sequence import Accepted, Sequence
from .speculation.planner import Planner


class Schedule:
    """Waiting sequences, and the batch of running ones.

    A decode step feeds [pending | draft tokens | masks] from each sequence's cursor. The KV entries of
    pending tokens become final in the same forward that verifies the draft tokens and makes the next
    predictions (paper: "cursor-based cache management"). The last chunk of a prompt has masks too, so that
    the first step gives several tokens. `budget`: of KV memory, None for no limit.
    """

    def __init__(
        self,
        backend: Backend,
        block: int,
        mask_id: int,
        limits: Limits,
        planner: Planner | None = None,
        budget: KvBudget | None = None,
    ) -> None:
        self.backend, self.block, self.limits, self.planner = backend, block, limits, planner
        self.budget = budget or KvBudget(limits.max_rows)
        self.waiting = Queue()
        self.batch = Batch(backend, limits.max_rows, mask_id)
        self.prefill = Prefill(self.batch, self.waiting, block, limits, self.budget)
        self.reader: Sequence | None = None  # of the chunk that the current step, or the last one, feeds

    def step(self) -> list[Accepted]:
        """One step: a chunk of one sequence's known tokens, or else a forward of all decoding sequences.

        Returns the outcome for each sequence. First it takes, once, what other threads asked of sequences;
        those that they ended leave before anything else happens.
        """
        accepted: list[Accepted] = []
        for seqs in self.admit(accepted):
            with error_boundary(seqs, accepted):
                plans = self.plan(seqs)
                output = self.forward(seqs, plans)
                self.accept(seqs, plans, output, accepted)
        self.finish(accepted)
        return accepted

    def steps(self) -> Iterator[list[Accepted]]:
        """The steps of one iteration, each as it is run: chunks, and then one of all decoding sequences."""
        yield self.step()
        while self.reader is not None:
            yield self.step()

    def iterate(self) -> list[Accepted]:
        """One whole iteration."""
        return [each for accepted in self.steps() for each in accepted]

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Clients take turns, and the sequences of each start in the order in which they
        were added; a shorter prompt may pass them only while a long prompt is being read.
        """
        self.waiting.add(seq)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.batch.active

    @property
    def num_rows(self) -> int:
        return self.limits.max_rows

    @property
    def num_running(self) -> int:
        return len(self.batch.active)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def running(self) -> abc.Sequence[Sequence]:
        """A snapshot of the running sequences, for other threads."""
        return tuple(self.batch.active)

    # --- the parts of a step ---

    def admit(self, accepted: list[Accepted]) -> list[list[Sequence]]:
        """Drop sequences that have ended, start waiting ones, and return the groups of neighbours that run
        now.
        """
        for seq in self.batch.active:
            seq.refresh()
        self._drop_finished(accepted)
        self.reader = self.prefill.next(accepted)
        if self.reader is None:
            return self.decoding(accepted)
        return [] if self.prefill.begin(self.reader, accepted) else [[self.reader]]

    def plan(self, seqs: abc.Sequence[Sequence]) -> list[StepPlan]:
        """The plans of these sequences."""
        if self.reader is None:
            return self.decode_plans(seqs)
        chunk = self.prefill.next_chunk(self.reader)
        return [StepPlan(chunk) if chunk < self.reader.num_pending else self.first_plan(self.reader)]

    def forward(self, seqs: abc.Sequence[Sequence], plans: abc.Sequence[StepPlan]) -> StepOutput:
        """Run the model."""
        output = self.batch.forward(seqs, plans)
        if self.reader is None and self.planner is not None:
            self.planner.record(len(seqs), max(plan.slots for plan in plans), self.batch.step_seconds)
        return output

    def accept(
        self,
        seqs: abc.Sequence[Sequence],
        plans: abc.Sequence[StepPlan],
        output: StepOutput,
        accepted: list[Accepted],
    ) -> None:
        """Add the outcome of the forward for each sequence. An error ends the sequence that it concerns."""
        slots = max(plan.slots for plan in plans)
        for i, (seq, plan) in enumerate(zip(seqs, plans, strict=True)):
            before, is_prompt = seq.cursor, seq.is_reading
            is_chunk = self.reader is not None and plan.pending < seq.num_pending
            with error_boundary([seq], accepted):
                if is_chunk:
                    seq.commit_chunk(plan.pending)
                elif (each := self.commit_and_accept(seq, output, i, plan)) is not None:
                    accepted.append(each)
            if seq.prefix_handle is not None:
                seq.prefix_handle.moved(before, seq.cursor, slots, is_chunk=is_chunk and is_prompt)
            if self.reader is not None and not is_chunk:
                self.batch.start_decoding(seq)

    def finish(self, accepted: list[Accepted]) -> None:
        """Drop sequences that have ended; at the end of an iteration without others, free the KV memory."""
        self._drop_finished(accepted)
        if self.reader is None and not self.batch.active:
            self.batch.free()

    def _drop_finished(self, accepted: list[Accepted]) -> None:
        self.waiting.drop_finished()
        self.batch.drop_finished(accepted)

    def room(self, seq: Sequence) -> int:
        """Slots of a decode step after the sequence's pending tokens."""
        room, most = self.batch.room(seq), self.budget.max_slots
        return room if most is None else min(room, most - seq.num_pending)

    # --- overridden by BlockSchedule, as is `step` ---

    def decoding(self, accepted: list[Accepted]) -> list[list[Sequence]]:
        """The groups of neighbours that take a decode step. Sequences whose context is full end."""
        for seq in self.batch.decoding:
            if not self.batch.fits(seq):
                accepted.append(seq.finish("capacity"))
            elif seq.prompt_lookup is not None and not self.prefill.is_behind(seq):
                with error_boundary([seq], accepted):
                    seq.consult_prompt_lookup(self.room(seq))
        self.batch.drop_finished(accepted)
        groups = groupby(self.batch.decoding, self.prefill.is_behind)
        return [list(seqs) for is_behind, seqs in groups if not is_behind]

    def decode_plans(self, seqs: abc.Sequence[Sequence]) -> list[StepPlan]:
        """The plans of these sequences for a decode step."""
        rooms = [self.room(seq) for seq in seqs]
        if self.planner is None:
            return [seq.widest_plan(room, self.block) for seq, room in zip(seqs, rooms, strict=True)]
        return self.planner.plans(seqs, rooms, self.block)

    def first_plan(self, seq: Sequence) -> StepPlan:
        """The last chunk of a prompt, with all masks: all its tokens are fed anyway."""
        return seq.widest_plan(self.batch.room(seq), self.block)

    def commit_and_accept(self, seq: Sequence, output: StepOutput, i: int, plan: StepPlan) -> Accepted | None:
        """Take the outputs of batch row `i`, for the last chunk of a prompt or in a decode step."""
        return seq.commit_and_accept(output, i, plan)


def run(schedule: Schedule, seqs: abc.Sequence[Sequence]) -> Iterator[list[Accepted]]:
    """Add `seqs` and decode until all have ended; yields the outcome of each step.

    Between two steps a sequence may get a new config, or a finish_reason.
    """
    for seq in seqs:
        schedule.add(seq)
    while not schedule.is_idle:
        if (accepted := schedule.step()) or schedule.reader is not None:
            yield accepted
