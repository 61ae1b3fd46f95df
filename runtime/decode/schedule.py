"""The decoding loop: continuous batching, one step at a time."""

from __future__ import annotations

from collections import Counter, abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated

from ..errors import SessionError
from ..rules import broken, integer, number
from .backend import Backend, StepOutput, StepPlan
from .batch import Batch, KvBudget, error_boundary
from .config import GenerationConfig
from .queue import Queue
from .sequence import Accepted, Sequence
from .speculation.planner import Planner

PREFILL_CHUNK = 256  # prompt tokens of one prefill forward when no other requests wait
MAX_PLACES = 2**20
Count = Annotated[int, integer(1, "1 or more")]
Most = Annotated[int | None, integer(1, "1 or more")]

OutputHandler = Callable[[Sequence, StepOutput, int, StepPlan], "Accepted | None"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much runs at once, and how much one request may ask for; None is no limit.

    max_rows: sequences that run at once.
    max_waiting: requests that may wait, not counting the next ones for free sequences.
    prefill_tokens: most prompt tokens that are prefilled between two decode steps. With more, a new request
        answers sooner; with fewer, it disturbs running requests less.
    max_prompt_tokens: longest prompt.
    max_new_tokens: longest answer.
    max_stops: most stop strings, and most eos_ids.
    kv_bytes: KV memory of all sequences. A request starts as soon as one of max_rows is free and a running
        batch, or the memory that these batches leave, has room for its prompt and max_new_tokens; at most
        4 x max_rows requests pass one that waits for memory, then no other starts before it.
    client_share: the part of all places, running and waiting, that one client may have: above 0, at most 1.
    max_rows_per_client: sequences of one client in one forward; its other requests wait, even for free
        sequences.

    Raises SessionError for invalid values.
    """

    max_rows: Count = 8
    max_waiting: Count = 64
    prefill_tokens: Count = 128
    max_prompt_tokens: Most = None
    max_new_tokens: Most = None
    max_stops: Most = None
    kv_bytes: Most = None
    client_share: Annotated[float, number("a number above 0, at most 1", high=1, above=True)] = 1.0
    max_rows_per_client: Most = None

    def __post_init__(self) -> None:
        problems = list(broken(self).values())
        for name in ("max_rows", "max_waiting"):
            if not problems and getattr(self, name) > MAX_PLACES:
                problems.append(f"{name} must be at most {MAX_PLACES}, not {getattr(self, name)!r}")
        if problems:
            raise SessionError("; ".join(problems))

    @property
    def max_of_client(self) -> int:
        """Requests that one client may have, running and waiting."""
        return max(1, int(self.client_share * (self.max_rows + self.max_waiting)))

    def check(self, config: GenerationConfig) -> None:
        """Raise SessionError if `config` asks for more than these limits allow."""
        requests = [
            ("max_new_tokens", "max_new_tokens", config.max_new_tokens, self.max_new_tokens),
            ("stop", "stop strings", len(config.stop), self.max_stops),
            ("eos_ids", "eos_ids", len(config.eos_ids or ()), self.max_stops),
        ]
        problems = {
            field: f"{asked} {name} are asked for, this service allows at most {most}; ask for fewer"
            for field, name, asked, most in requests
            if most is not None and asked > most
        }
        if problems:
            field = next(iter(problems))
            raise SessionError("; ".join(problems.values()), code="limit_exceeded", field=field)

    @classmethod
    def of_rows(cls, num_rows: int) -> Limits:
        """For sequences that no other request waits for."""
        return cls(num_rows, prefill_tokens=PREFILL_CHUNK)


class Schedule:
    """The sequences that run, in neighbouring KV rows: first the decoding ones, then those whose prompts are
    being read, shorter ones before longer ones.

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
        self.backend, self.block, self.mask_id = backend, block, mask_id
        self.limits, self.planner = limits, planner
        self.budget = budget or KvBudget(limits.max_rows)
        self.waiting = Queue()
        self._batch = Batch(backend, limits.max_rows, mask_id)
        self._num_decoding = 0
        # Prompts are read in chunks of one size, so that a prompt takes the same forwards every time.
        self._chunk = min(limits.prefill_tokens, backend.max_slots or limits.prefill_tokens)
        self._num_chunks = 0  # that were read so far: prompts take turns
        self._failures: list[Accepted] = []  # of sequences whose entries could not be moved

    @property
    def num_running(self) -> int:
        return len(self._batch.active)

    @property
    def num_rows(self) -> int:
        return self.limits.max_rows

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def running(self) -> abc.Sequence[Sequence]:
        """A snapshot of the running sequences, for other threads."""
        return tuple(self._batch.active)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self._batch.active

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Clients take turns, and the sequences of each start in the order in which they
        were added; a shorter prompt may pass them only while a long prompt is being read.
        """
        self.waiting.add(seq)

    def iterate(self) -> list[Accepted]:
        """One whole iteration; returns its events.

        A sequence whose finish_reason was set from outside leaves before anything else happens.
        """
        return [event for events in self.forwards() for event in events]

    def forwards(self) -> Iterator[list[Accepted]]:
        """The forwards of one iteration, each as it is run: chunks of prompts, a chunk of a long forced text,
        and one step of all decoding sequences. Of the chunks of a prompt only the last has events.
        """
        self._drop_finished()
        yield from self._prefill()
        self._drop_finished()
        yield from self._catch_up()
        if (seqs := self._decoding()) and (events := self._decode(seqs)):
            yield events
        self._drop_finished()
        if self._failures:
            yield self._failures
            self._failures = []
        if not self._batch.active and self._batch.cache.capacity:
            self._batch = Batch(self.backend, self._batch.num_rows, self.mask_id)  # frees the KV memory

    # --- prefill ---

    def _prefill(self) -> Iterator[list[Accepted]]:
        """Read chunks of prompts until the prompt tokens of the iteration are used up."""
        budget = self._chunk
        while True:
            self._admit()
            self._drop_finished()  # sequences that could not be moved
            seq = self._reader()
            if seq is None or (chunk := self._next_chunk(seq)) > budget:
                return
            if events := self._begin(seq):
                yield events
            else:
                budget -= chunk
                self._num_chunks += 1
                if chunk < seq.num_pending:
                    yield self._run([seq], [StepPlan(chunk)], _commit_chunk, is_chunk=True)
                elif events := self._read_last_chunk(seq):
                    yield events
            self._drop_finished()

    def _read_last_chunk(self, seq: Sequence) -> list[Accepted]:
        """The sequence decodes from now on."""
        plan = self._first_plan(seq)
        self._num_decoding += 1
        events = self._run([seq], [plan], self._finish_prompt)
        self._batch.store(self._num_decoding - 1)  # now: the next prompt may begin alike
        return events

    def _next_chunk(self, seq: Sequence) -> int:
        """Tokens up to the next multiple of the chunk size, also for a sequence that began with saved
        entries.
        """
        return min(self._chunk - seq.cursor % self._chunk, seq.num_pending)

    def _chunks_left(self, seq: Sequence) -> int:
        return -(-len(seq.tokens) // self._chunk) - seq.cursor // self._chunk

    def _reader(self) -> Sequence | None:
        """The sequence whose prompt is read next.

        Odd chunks go to the longest prompt, so that shorter ones cannot starve it. The others go to the
        shortest, which ends first. Decoding sequences are neighbours, so the last chunk of another sequence
        waits.
        """
        readers = self._batch.active[self._num_decoding :]
        if not readers:
            return None
        is_lasts_turn = self._num_chunks % 2 == 1 and self._chunks_left(readers[-1]) > 1
        return readers[-1] if is_lasts_turn else readers[0]

    def _next_waiting(self) -> Sequence | None:
        """The waiting sequence that starts next: the first one, or while prompts are being read the first
        that has at most half the chunks of the shortest of them.
        """
        readers = self._batch.active[self._num_decoding :]
        if not readers:
            return next(self._candidates(), None)
        if self._chunks_left(readers[-1]) <= 1:
            return None  # the last chunk of that prompt waits for the others
        shortest = self._chunks_left(readers[0])
        return next((seq for seq in self._candidates() if 2 * self._chunks_left(seq) <= shortest), None)

    def _admit(self) -> None:
        """Start a waiting sequence, before the others whose prompts are being read, if there is room."""
        seq = self._next_waiting()
        if seq is None or self.num_running == self.limits.max_rows:
            return
        self.waiting.remove(seq)
        active, first = self._batch.active, self._num_decoding
        active.append(seq)
        for i in range(len(active) - 1, first, -1):
            self._move(i - 1, i)
        active[first] = seq
        self._batch.lookup(first, self._chunk, self.budget.max_entries(self._batch.num_rows))

    def _candidates(self) -> Iterator[Sequence]:
        """Waiting sequences in the order of their turns, without those of clients that have all their
        sequences.
        """
        most = self.limits.max_rows_per_client
        if most is None:
            return iter(self.waiting)
        running = Counter(seq.client for seq in self._batch.active if seq.client is not None)
        return (seq for seq in self.waiting if running[seq.client] < most)

    def _begin(self, seq: Sequence) -> list[Accepted]:
        """Append the tokens that are known without a prediction."""
        events: list[Accepted] = []
        with error_boundary([seq], events):
            if (event := seq.begin(self.backend.max_capacity)) is not None:
                events.append(event)
        return events

    # The block loop overrides the next two, and `_decode`.

    def _first_plan(self, seq: Sequence) -> StepPlan:
        """The last chunk of a prompt, with all masks: all its tokens are fed anyway."""
        return seq.widest_plan(self._batch.room(seq), self.block)

    def _finish_prompt(self, seq: Sequence, output: StepOutput, i: int, plan: StepPlan) -> Accepted | None:
        return _accept(seq, output, i, plan)

    def _decoding(self) -> list[Sequence]:
        return self._batch.active[: self._num_decoding]

    @property
    def _max_pending(self) -> int:
        """Most tokens of an answer that a step feeds at once."""
        most = max(self.limits.prefill_tokens, 2 * self.block)
        return min(most, self.backend.max_slots or most, self.budget.max_slots or most)

    def _must_catch_up(self, seq: Sequence) -> bool:
        """Whether more tokens are pending than a step feeds, for example after a long forced text."""
        return seq.num_pending > self._max_pending and self._batch.fits(seq)

    def _catch_up(self) -> Iterator[list[Accepted]]:
        """Feed a chunk of the first sequence that must catch up; the other sequences decode on."""
        seq = next(filter(self._must_catch_up, self._decoding()), None)
        if seq is not None:
            yield self._run([seq], [StepPlan(self._max_pending)], _commit_forced)
            self._drop_finished()

    def _decode(self, seqs: list[Sequence]) -> list[Accepted]:
        events = [seq.finish("capacity") for seq in seqs if not self._batch.fits(seq)]
        for seq in seqs:
            if seq.prompt_lookup is not None and not self._must_catch_up(seq):
                with error_boundary([seq], events):
                    seq.consult_prompt_lookup(self._room(seq))
        if events:
            self._drop_finished()
            seqs = self._decoding()
        for must_catch_up, group in groupby(seqs, self._must_catch_up):
            if must_catch_up:
                continue
            neighbours, plans = list(group), list[StepPlan]()
            with error_boundary(neighbours, events):
                plans = self._plans(neighbours)
            if plans:
                events += self._run(neighbours, plans, _accept)
        return events

    def _room(self, seq: Sequence) -> int:
        """Slots of a decode step after the sequence's pending tokens."""
        room, most = self._batch.room(seq), self.budget.max_slots
        return room if most is None else min(room, most - seq.num_pending)

    def _plans(self, seqs: abc.Sequence[Sequence]) -> list[StepPlan]:
        rooms = [self._room(seq) for seq in seqs]
        if self.planner is None:
            return [seq.widest_plan(room, self.block) for seq, room in zip(seqs, rooms, strict=True)]
        return self.planner.plans(seqs, rooms, self.block)

    # --- forwards and places ---

    def _run(
        self,
        seqs: abc.Sequence[Sequence],
        plans: abc.Sequence[StepPlan],
        handle: OutputHandler,
        *,
        is_chunk: bool = False,
    ) -> list[Accepted]:
        """One forward over neighbouring sequences, or with `is_chunk` over a whole chunk of one prompt. An
        error ends the sequences that it concerns, and no others.
        """
        for seq in seqs:
            seq.start()
        events: list[Accepted] = []
        slots = max(plan.slots for plan in plans)
        with error_boundary(seqs, events):
            output = self._batch.forward(self._batch.active.index(seqs[0]), plans)
        if events:
            return events
        if handle is _accept and self.planner is not None:  # a decode step, not a part of a prompt
            self.planner.record(len(seqs), slots, self._batch.step_seconds)
        for i, (seq, plan) in enumerate(zip(seqs, plans, strict=True)):
            before = seq.cursor
            with error_boundary([seq], events):
                if (event := handle(seq, output, i, plan)) is not None:
                    events.append(event)
            if seq.prefix_handle is not None:
                seq.prefix_handle.moved(before, seq.cursor, slots, is_chunk=is_chunk)
        return events

    def _drop_finished(self) -> None:
        """Remove sequences that have ended, and close the gaps; decoding sequences stay first."""
        batch = self._batch
        self.waiting.drop_finished()
        while ended := [i for i, seq in enumerate(batch.active) if seq.finish_reason is not None]:
            i = ended[-1]
            batch.store(i)
            if i < self._num_decoding:
                self._num_decoding -= 1
                self._move(self._num_decoding, i)
                i = self._num_decoding
            for later in range(i + 1, len(batch.active)):
                self._move(later, later - 1)
            batch.active.pop()

    def _move(self, source: int, target: int) -> None:
        """Move a sequence to another place; it ends if its entries cannot be copied."""
        with error_boundary([self._batch.active[source]], self._failures):
            self._batch.move(source, target)


def _accept(seq: Sequence, output: StepOutput, i: int, plan: StepPlan) -> Accepted | None:
    return seq.commit_and_accept(output, i, plan)


def _commit_chunk(seq: Sequence, _output: StepOutput, _i: int, plan: StepPlan) -> None:
    """A chunk of a prompt is final; its output is not used."""
    seq.cursor += plan.pending
    seq.stats.prefill_forwards += 1


def _commit_forced(seq: Sequence, _output: StepOutput, _i: int, plan: StepPlan) -> None:
    """A chunk of the answer is final; its output is not used."""
    seq.cursor += plan.pending
    seq.stats.forwards += 1


def run(schedule: Schedule, seqs: abc.Sequence[Sequence]) -> Iterator[list[Accepted]]:
    """Add `seqs` and decode until all have ended; yields the events of each forward.

    Between two forwards a sequence may get a new config, or a finish_reason.
    """
    for seq in seqs:
        schedule.add(seq)
    while not schedule.is_idle:
        yield from schedule.forwards()
