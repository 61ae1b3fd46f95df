"""The decoding loop: continuous batching, one step at a time."""

from __future__ import annotations

from collections import Counter, abc, deque
from collections.abc import Hashable, Iterator
from itertools import groupby, takewhile

from ..errors import SessionError
from .backend import Backend, StepOutput, StepPlan
from .batch import Batch
from .budget import KvBudget
from .event import Event
from .limits import Limits
from .sequence import Sequence
from .speculation.planner import StepPlanner

MAX_PASSES = 4  # times max_rows: sequences that may pass one that waits for memory


class Queue:
    """Iterates over sequences in the order in which they would start: the first sequence of each client, then
    the second of each, and so on. After a sequence has started, its client comes last.

    So a client that sends a hundred requests at once delays only itself. Sequences without a client count as
    sequences of one client.
    """

    def __init__(self) -> None:
        self._seqs: dict[Hashable, deque[Sequence]] = {}  # clients in the order of their turns

    def __len__(self) -> int:
        return sum(len(seqs) for seqs in tuple(self._seqs.values()))

    def __bool__(self) -> bool:
        return bool(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        """Lazy, because usually the first sequences are enough."""
        clients = [iter(seqs) for seqs in self._seqs.values()]
        while clients:
            remaining = []
            for seqs in clients:
                if (seq := next(seqs, None)) is not None:
                    yield seq
                    remaining.append(seqs)
            clients = remaining

    def add(self, seq: Sequence) -> None:
        """Add a sequence after the others of its client."""
        self._seqs.setdefault(seq.client, deque()).append(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that starts; its client's turn is over."""
        seqs = self._seqs.pop(seq.client)
        seqs.remove(seq)
        if seqs:
            self._seqs[seq.client] = seqs

    def drop_finished(self) -> None:
        """Remove sequences that ended while they waited. The turns of clients do not change."""
        for client, seqs in list(self._seqs.items()):
            for seq in seqs:
                seq.refresh()
            if any(seq.finish_reason is not None for seq in seqs):
                self._seqs[client] = deque(seq for seq in seqs if seq.finish_reason is None)
                if not self._seqs[client]:
                    del self._seqs[client]


class Prefill:
    """Chunks between two decode steps: of prompts, `prefill_tokens` at most, and one of a long forced text.

    Prompts are read in chunks of one size, so that a prompt takes the same forwards every time.
    """

    def __init__(self, batch: Batch, waiting: Queue, block: int, limits: Limits, budget: KvBudget) -> None:
        self.batch, self.waiting, self.limits, self.budget = batch, waiting, limits, budget
        limit = limits.prefill_tokens
        self.chunk = min(limit, batch.backend.max_slots or limit)
        limit = max(limit, 2 * block, limits.cache_block)  # tokens of an answer that a step feeds at once
        self.max_pending = min(limit, batch.backend.max_slots or limit, budget.max_slots or limit)
        self.is_memory_short = False  # a sequence waits for memory
        self.num_chunks = 0  # that were read so far: prompts take turns

    def next(self, left: int) -> Sequence | None:
        """The sequence whose prompt is read next; None if its chunk has more than `left` tokens."""
        self.start_waiting()
        if not (prefilling := self.batch.prefilling):
            return None
        # Odd chunks go to the longest prompt, so that shorter ones cannot starve it. The others go to the
        # shortest, which ends first. Decoding sequences are neighbours, so the last chunk of another sequence
        # waits.
        longest_is_next = self.num_chunks % 2 == 1 and self._chunks_left(prefilling[-1]) > 1
        seq = prefilling[-1] if longest_is_next else prefilling[0]
        return seq if self.chunk_of(seq) <= left else None

    def needs_chunk(self, seq: Sequence) -> bool:
        """Whether more tokens are pending than a step feeds, for example after a long forced text."""
        return seq.num_pending > self.max_pending and self.batch.fits(seq)

    def start_waiting(self) -> None:
        """Start a waiting sequence, before the others whose prompts are being read, if there is room."""
        has_place = len(self.batch.active) < self.limits.max_rows
        if has_place and (seq := self._next_waiting()) is not None:
            if self.budget.num_bytes is not None:
                for other in takewhile(lambda other: other is not seq, self._with_places()):
                    other.num_passes += not self._fits(other)
            self.waiting.remove(seq)
            self.batch.add(seq)
            self.batch.lookup(seq, self.chunk, self.budget.max_entries)
            self.batch.drop_finished()  # sequences that could not be moved
        if self.budget.num_bytes is not None:
            self.is_memory_short = not all(map(self._fits, self._with_places()))

    def _next_waiting(self) -> Sequence | None:
        """The waiting sequence that starts next: the first one, or while prompts are being read the first
        that has at most half the chunks of the shortest of them.
        """
        prefilling = self.batch.prefilling
        if not prefilling:
            return next(self._candidates(), None)
        if self._chunks_left(prefilling[-1]) <= 1:
            return None  # the last chunk of that prompt waits for the others
        shortest = self._chunks_left(prefilling[0])
        return next((seq for seq in self._candidates() if 2 * self._chunks_left(seq) <= shortest), None)

    def _fits(self, seq: Sequence) -> bool:
        """Whether the memory that running sequences leave is enough for `seq`."""
        left = self.budget.left(self.batch.active)
        return left is None or self.budget.entries(seq) <= left

    def _candidates(self) -> Iterator[Sequence]:
        """Waiting sequences that may start, in the order of their turns. Others may pass one that waits for
        memory, MAX_PASSES times as many as `max_rows`; then they wait until it has started.
        """
        if self.budget.num_bytes is None:
            return self._with_places()
        limit, seqs = MAX_PASSES * self.limits.max_rows, list(self._with_places())
        late = [seq for seq in seqs if seq.num_passes >= limit][:1]
        return filter(self._fits, late or seqs)

    def _with_places(self) -> Iterator[Sequence]:
        """Waiting sequences in the order of their turns, without those of clients that have all their
        sequences.
        """
        limit = self.limits.max_rows_per_client
        if limit is None:
            return iter(self.waiting)
        running = Counter(seq.client for seq in self.batch.active if seq.client is not None)
        return (seq for seq in self.waiting if running[seq.client] < limit)

    def chunk_of(self, seq: Sequence) -> int:
        """Tokens up to the next multiple of the chunk size, also for a sequence that began with saved
        entries, or to where the prefix cache copies its states.
        """
        chunk, stop = min(self.chunk - seq.cursor % self.chunk, seq.num_pending), seq.next_copy
        return chunk if stop is None else min(chunk, stop - seq.cursor)

    def _chunks_left(self, seq: Sequence) -> int:
        return -(-len(seq.tokens) // self.chunk) - seq.cursor // self.chunk


class Schedule:
    """Waiting sequences, and the batch of running ones.

    A decode step feeds [pending | draft tokens | masks] from each sequence's cursor. The KV entries of
    pending tokens become final in the same forward that verifies the draft tokens and makes the next
    predictions (paper: "cursor-based cache management"); with a tau only when `limits.cache_block` tokens are
    pending. The last chunk of a prompt has masks too, so that the first step gives several tokens. `budget`:
    of KV memory, None for no limit. Raises SessionError if a cache block does not fit a step.
    """

    def __init__(
        self,
        backend: Backend,
        block: int,
        mask_id: int,
        limits: Limits,
        planner: StepPlanner | None = None,
        budget: KvBudget | None = None,
    ) -> None:
        self.backend, self.block, self.limits, self.planner = backend, block, limits, planner
        self.budget = budget or KvBudget(limits.max_rows)
        self._max_slots = self.budget.max_slots
        slots = min(filter(None, (backend.max_slots, self._max_slots)), default=None)
        if slots is not None and limits.cache_block > slots:
            raise SessionError(
                f"a cache block of {limits.cache_block} tokens does not fit a step of {slots} slots;"
                " give a smaller one"
            )
        self.waiting = Queue()
        releases_rows = self.budget.num_bytes is not None and self.budget.by_row
        self.batch = Batch(backend, limits.max_rows, mask_id, releases_rows=releases_rows)
        self.prefill = Prefill(self.batch, self.waiting, block, limits, self.budget)

    def step(self) -> Iterator[list[Event]]:
        """One step: chunks of prompts, one of a long forced text, then a forward of all decoding sequences.

        Yields the outcomes of each chunk, even if there are none, and of the forward. What other threads
        asked of the sequences is taken before each of them; those that they ended leave first.
        """
        left = self.prefill.chunk  # prompt tokens of this step
        self._refresh()
        while (seq := self.prefill.next(left)) is not None:
            left -= self._feed_chunk(seq, self.prefill.chunk_of(seq))
            yield self.batch.take_outcomes()
            self._refresh()
        if (seq := next(filter(self.prefill.needs_chunk, self.batch.decoding), None)) is not None:
            self._feed_chunk(seq, self.prefill.max_pending)
            yield self.batch.take_outcomes()
            self._refresh()
        self._decode()
        if not self.batch.active:
            self.batch.free()
        if outcomes := self.batch.take_outcomes():
            yield outcomes

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Clients take turns, and the sequences of each start in the order in which they
        were added; a shorter prompt may pass them only while a long prompt is being read.
        """
        seq.block, seq.cache_block = self.block, self.limits.cache_block
        self.waiting.add(seq)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.batch.active

    @property
    def num_rows(self) -> int:
        """Sequences that run, and those of half an equal share of the KV memory that could start; none could
        while one waits for memory.
        """
        running, limit = self.running, self.limits.max_rows
        if (left := self.budget.left(running)) is None:
            return limit
        is_short = self.waiting and self.prefill.is_memory_short
        return min(limit, len(running) + (0 if is_short else left // max(1, self.budget.half_share)))

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

    def _refresh(self) -> None:
        """Take what other threads asked for, and drop sequences that have ended."""
        for seq in self.batch.active:
            seq.refresh()
        self._drop_finished()

    def _feed_chunk(self, seq: Sequence, chunk: int) -> int:
        """Feed the next `chunk` known tokens of one sequence, with masks if it is the last chunk; returns its
        length. Tokens that are known without a prediction come first, as a chunk of length 0.
        """
        with self.batch.ending([seq]):
            if (known := seq.begin(self.backend.max_capacity)) is not None:
                self.batch.outcomes.append(known)
                chunk = 0
            else:
                is_last, self.prefill.num_chunks = chunk == seq.num_pending, self.prefill.num_chunks + 1
                room, is_copied = self.batch.room(seq), seq.next_copy == seq.cursor + chunk
                if not is_last:
                    plan = StepPlan(chunk)
                elif self.planner is None:
                    plan = seq.widest_plan(room)
                else:
                    num = min(self.limits.max_rows, self.num_running + self.num_waiting)
                    plan = self.planner.prompt_plan(seq, room, num)
                self._take(seq, self.batch.forward([seq], [plan]), 0, plan)
                if is_last:
                    self.batch.start_decoding(seq)
                elif is_copied:
                    self.batch.store(seq)
        self._drop_finished()
        return chunk

    def _decode(self) -> None:
        """One forward of all decoding sequences. Those whose context is full end."""
        for seq in self.batch.decoding:
            with self.batch.ending([seq]):
                if not self.batch.fits(seq):
                    self.batch.outcomes.append(seq.finish("capacity"))
                elif seq.prompt_lookup is not None and not self.prefill.needs_chunk(seq):
                    seq.consult_prompt_lookup(self._room(seq))
        self.batch.drop_finished()
        for needs_chunk, group in groupby(self.batch.decoding, self.prefill.needs_chunk):
            seqs = list(group)
            if needs_chunk:
                continue
            with self.batch.ending(seqs):
                rooms = [self._room(seq) for seq in seqs]
                if self.planner is None:
                    plans = [seq.widest_plan(room) for seq, room in zip(seqs, rooms, strict=True)]
                else:
                    plans = self.planner.plans(seqs, rooms)
                output = self.batch.forward(seqs, plans)
                if self.planner is not None and output.is_prepared:
                    slots = max(plan.slots for plan in plans)
                    self.planner.learned_cost.record(len(seqs), slots, self.batch.step_seconds)
                for i, (seq, plan) in enumerate(zip(seqs, plans, strict=True)):
                    with self.batch.ending([seq]):
                        self._take(seq, output, i, plan)
        self._drop_finished()

    def _take(self, seq: Sequence, output: StepOutput, i: int, plan: StepPlan) -> None:
        """Take the outputs of batch row `i`; those of a chunk that is not the last are not used."""
        before, is_chunk, is_prompt = seq.cursor, plan.pending < seq.num_pending, seq.is_prefilling
        if is_chunk:
            seq.commit_chunk(plan.pending)
        elif (each := seq.commit_and_accept(output, i, plan)) is not None:
            self.batch.outcomes.append(each)
        least = self.backend.reproducible_slots
        is_reproducible = is_chunk and is_prompt if least is None else self.batch.step_slots >= least
        if is_reproducible and before == seq.num_reproducible:
            seq.num_reproducible = seq.cursor

    def _drop_finished(self) -> None:
        self.waiting.drop_finished()
        self.batch.drop_finished()

    def _room(self, seq: Sequence) -> int:
        """Slots of a decode step after the sequence's pending tokens."""
        room, limit = self.batch.room(seq), self._max_slots
        return room if limit is None else min(room, limit - seq.num_pending)


def run(schedule: Schedule, seqs: abc.Sequence[Sequence]) -> Iterator[list[Event]]:
    """Add `seqs` and decode until all have ended; yields the outcomes of each forward.

    Between two of them a sequence may be changed or ended.
    """
    for seq in seqs:
        schedule.add(seq)
    while not schedule.is_idle:
        yield from schedule.step()
