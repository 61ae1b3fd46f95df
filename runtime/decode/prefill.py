"""The queue of waiting sequences, and which of them starts or feeds a chunk of known tokens next."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator
from itertools import takewhile

from .batch import Batch
from .budget import KvBudget
from .limits import Limits
from .sequence import Accepted, Sequence

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

    def next(self, left: int, accepted: list[Accepted]) -> Sequence | None:
        """The sequence whose prompt is read next; None if its chunk has more than `left` tokens."""
        self.admit(accepted)
        seq = self._reader()
        return seq if seq is not None and self.chunk_of(seq) <= left else None

    def is_behind(self, seq: Sequence) -> bool:
        """Whether more tokens are pending than a step feeds, for example after a long forced text."""
        return seq.num_pending > self.max_pending and self.batch.fits(seq)

    def admit(self, accepted: list[Accepted]) -> None:
        """Start a waiting sequence, before the others whose prompts are being read, if there is room."""
        has_place = len(self.batch.active) < self.limits.max_rows
        if has_place and (seq := self._next_waiting()) is not None:
            if self.budget.num_bytes is not None:
                for other in takewhile(lambda other: other is not seq, self._with_places()):
                    other.num_passes += not self._fits(other)
            self.waiting.remove(seq)
            self.batch.add(seq, accepted)
            self.batch.lookup(seq, self.chunk, self.budget.max_entries)
            self.batch.drop_finished(accepted)  # sequences that could not be moved
        if self.budget.num_bytes is not None:
            self.is_memory_short = not all(map(self._fits, self._with_places()))

    def _next_waiting(self) -> Sequence | None:
        """The waiting sequence that starts next: the first one, or while prompts are being read the first
        that has at most half the chunks of the shortest of them.
        """
        readers = self.batch.readers
        if not readers:
            return next(self._candidates(), None)
        if self._chunks_left(readers[-1]) <= 1:
            return None  # the last chunk of that prompt waits for the others
        shortest = self._chunks_left(readers[0])
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

    def _reader(self) -> Sequence | None:
        """The sequence whose prompt is read next.

        Odd chunks go to the longest prompt, so that shorter ones cannot starve it. The others go to the
        shortest, which ends first. Decoding sequences are neighbours, so the last chunk of another sequence
        waits.
        """
        readers = self.batch.readers
        if not readers:
            return None
        longest_is_next = self.num_chunks % 2 == 1 and self._chunks_left(readers[-1]) > 1
        return readers[-1] if longest_is_next else readers[0]

    def chunk_of(self, seq: Sequence) -> int:
        """Tokens up to the next multiple of the chunk size, also for a sequence that began with saved
        entries.
        """
        return min(self.chunk - seq.cursor % self.chunk, seq.num_pending)

    def _chunks_left(self, seq: Sequence) -> int:
        return -(-len(seq.tokens) // self.chunk) - seq.cursor // self.chunk
