"""The decoding loop: continuous batching, one step at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated

from ..errors import SessionError
from ..rules import broken, integer, number
from .backend import Backend, Feed, StepOutput
from .batch import Batch, KvBudget, error_boundary
from .config import GenerationConfig
from .pace.policy import Policy
from .queue import Queue
from .row import Accepted, Row

PREFILL_CHUNK = 256  # prompt tokens of one prefill forward when no other requests wait
MAX_PLACES = 2**20
Count = Annotated[int, integer(1, "1 or more")]
Most = Annotated[int | None, integer(1, "1 or more")]

OutputHandler = Callable[[Row, StepOutput, int, Feed], "Accepted | None"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much runs at once, and how much one request may ask for; None is no limit.

    max_rows: sequences that run at once.
    max_waiting: requests that may wait, besides those that free rows are about to take.
    prefill_tokens: most prompt tokens that are prefilled between two decode steps. With more, a new request
        answers sooner; with fewer, it disturbs running requests less.
    max_prompt_tokens: longest prompt.
    max_new_tokens: longest answer.
    max_stops: most stop strings, and most eos_ids.
    kv_bytes: KV memory of all rows. A request starts as soon as one of max_rows is free and a running batch,
        or the memory that these batches leave, has room for its prompt and max_new_tokens; at most
        4 x max_rows requests pass one that waits for memory, then no other starts before it.
    client_share: the part of all places, running and waiting, that one client may have: above 0, at most 1.
    max_rows_per_client: sequences of one client in one forward; its other requests wait, even for free rows.

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
        """For rows that no other request waits for."""
        return cls(num_rows, prefill_tokens=PREFILL_CHUNK)


class Schedule:
    """The rows that run, in neighbouring KV rows: first the decoding ones, then those whose prompts are being
    read, shorter ones before longer ones.

    A decode step feeds [pending | proposals | masks] from each row's cursor. The KV entries of pending tokens
    become final in the same forward that verifies the proposals and makes the next predictions (paper:
    "cursor-based cache management"). The last chunk of a prompt has masks too, so that the first step gives
    several tokens. `budget`: of KV memory, None for no limit.
    """

    def __init__(
        self,
        backend: Backend,
        block: int,
        mask_id: int,
        limits: Limits,
        policy: Policy | None = None,
        budget: KvBudget | None = None,
    ) -> None:
        self.backend, self.block, self.mask_id = backend, block, mask_id
        self.limits, self.policy = limits, policy
        self.budget = budget or KvBudget(limits.max_rows)
        self.waiting = Queue()
        self._batch = Batch(backend, limits.max_rows, mask_id)
        self._num_decoding = 0
        # Prompts are read in chunks of one size, so that a prompt takes the same forwards every time.
        self._chunk = min(limits.prefill_tokens, backend.max_slots or limits.prefill_tokens)
        self._num_chunks = 0  # that were read so far: prompts take turns
        self._failures: list[Accepted] = []  # of rows whose entries could not be moved

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
    def running(self) -> Sequence[Row]:
        """A snapshot of the running rows, for other threads."""
        return tuple(self._batch.active)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self._batch.active

    def add(self, row: Row) -> None:
        """Queue a row. Clients take turns, and the rows of each start in the order in which they were added;
        a shorter prompt may pass them only while a long prompt is being read.
        """
        self.waiting.add(row)

    def iterate(self) -> list[Accepted]:
        """One whole iteration; returns its events.

        A row whose finish_reason was set from outside leaves before anything else happens.
        """
        return [event for events in self.forwards() for event in events]

    def forwards(self) -> Iterator[list[Accepted]]:
        """The forwards of one iteration, each as it is run: chunks of prompts, a chunk of a long forced text,
        and one step of all decoding rows. Of the chunks of a prompt only the last has events.
        """
        self._drop_finished()
        yield from self._prefill()
        self._drop_finished()
        yield from self._catch_up()
        if (rows := self._decoding()) and (events := self._decode(rows)):
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
            self._drop_finished()  # rows that could not be moved
            row = self._reader()
            if row is None or (chunk := self._next_chunk(row)) > budget:
                return
            if events := self._begin(row):
                yield events
            else:
                budget -= chunk
                self._num_chunks += 1
                if chunk < row.num_pending:
                    yield self._run([row], [Feed(chunk)], _commit_chunk, is_chunk=True)
                elif events := self._read_last_chunk(row):
                    yield events
            self._drop_finished()

    def _read_last_chunk(self, row: Row) -> list[Accepted]:
        """The row decodes from now on."""
        feed = self._first_feed(row)
        self._num_decoding += 1
        events = self._run([row], [feed], self._finish_prompt)
        self._batch.keep(self._num_decoding - 1)  # now: the next prompt may begin alike
        return events

    def _next_chunk(self, row: Row) -> int:
        """Tokens up to the next multiple of the chunk size, also for a row that began with saved entries."""
        return min(self._chunk - row.cursor % self._chunk, row.num_pending)

    def _chunks_left(self, row: Row) -> int:
        return -(-len(row.tokens) // self._chunk) - row.cursor // self._chunk

    def _reader(self) -> Row | None:
        """The row whose prompt is read next.

        Odd chunks go to the longest prompt, so that shorter ones cannot starve it. The others go to the
        shortest, which ends first. Decoding rows are neighbours, so the last chunk of another row waits.
        """
        readers = self._batch.active[self._num_decoding :]
        if not readers:
            return None
        is_lasts_turn = self._num_chunks % 2 == 1 and self._chunks_left(readers[-1]) > 1
        return readers[-1] if is_lasts_turn else readers[0]

    def _next_waiting(self) -> Row | None:
        """The waiting row that starts next: the first one, or while prompts are being read the first that has
        at most half the chunks of the shortest of them.
        """
        readers = self._batch.active[self._num_decoding :]
        if not readers:
            return next(self._candidates(), None)
        if self._chunks_left(readers[-1]) <= 1:
            return None  # the last chunk of that prompt waits for the others
        shortest = self._chunks_left(readers[0])
        return next((row for row in self._candidates() if 2 * self._chunks_left(row) <= shortest), None)

    def _admit(self) -> None:
        """Start a waiting row, before the others whose prompts are being read, if there is room."""
        row = self._next_waiting()
        if row is None or self.num_running == self.limits.max_rows:
            return
        self.waiting.remove(row)
        active, first = self._batch.active, self._num_decoding
        active.append(row)
        for i in range(len(active) - 1, first, -1):
            self._move(i - 1, i)
        active[first] = row
        self._batch.recall(first, self._chunk, self.budget.max_entries(self._batch.num_rows))

    def _candidates(self) -> Iterator[Row]:
        """Waiting rows in the order of their turns, without those of clients that have all their rows."""
        most = self.limits.max_rows_per_client
        if most is None:
            return iter(self.waiting)
        running = Counter(row.client for row in self._batch.active if row.client is not None)
        return (row for row in self.waiting if running[row.client] < most)

    def _begin(self, row: Row) -> list[Accepted]:
        """Append the tokens that are known without a prediction."""
        events: list[Accepted] = []
        with error_boundary([row], events):
            if (event := row.begin(self.backend.max_capacity)) is not None:
                events.append(event)
        return events

    # The block loop overrides the next two, and `_decode`.

    def _first_feed(self, row: Row) -> Feed:
        """The last chunk of a prompt, with a full window: all its tokens are fed anyway."""
        return row.widest_feed(self._batch.room(row), self.block)

    def _finish_prompt(self, row: Row, output: StepOutput, i: int, feed: Feed) -> Accepted | None:
        return _accept(row, output, i, feed)

    def _decoding(self) -> list[Row]:
        return self._batch.active[: self._num_decoding]

    @property
    def _max_pending(self) -> int:
        """Most tokens of an answer that a step feeds at once."""
        most = max(self.limits.prefill_tokens, 2 * self.block)
        return min(most, self.backend.max_slots or most, self.budget.max_slots or most)

    def _must_catch_up(self, row: Row) -> bool:
        """Whether more tokens are pending than a step feeds, for example after a long forced text."""
        return row.num_pending > self._max_pending and self._batch.fits(row)

    def _catch_up(self) -> Iterator[list[Accepted]]:
        """Feed a chunk of the first row that must catch up; the other rows decode on."""
        row = next(filter(self._must_catch_up, self._decoding()), None)
        if row is not None:
            yield self._run([row], [Feed(self._max_pending)], _commit_forced)
            self._drop_finished()

    def _decode(self, rows: list[Row]) -> list[Accepted]:
        events = [row.finish("capacity") for row in rows if not self._batch.fits(row)]
        for row in rows:
            if row.lookup is not None and not self._must_catch_up(row):
                with error_boundary([row], events):
                    row.consult_lookup(self._room(row))
        if events:
            self._drop_finished()
            rows = self._decoding()
        for must_catch_up, group in groupby(rows, self._must_catch_up):
            if must_catch_up:
                continue
            neighbours, feeds = list(group), list[Feed]()
            with error_boundary(neighbours, events):
                feeds = self._feeds(neighbours)
            if feeds:
                events += self._run(neighbours, feeds, _accept)
        return events

    def _room(self, row: Row) -> int:
        """Slots of a decode step after the row's pending tokens."""
        room, most = self._batch.room(row), self.budget.max_slots
        return room if most is None else min(room, most - row.num_pending)

    def _feeds(self, rows: Sequence[Row]) -> list[Feed]:
        rooms = [self._room(row) for row in rows]
        if self.policy is None:
            return [row.widest_feed(room, self.block) for row, room in zip(rows, rooms, strict=True)]
        return self.policy.feeds(rows, rooms, self.block)

    # --- forwards and places ---

    def _run(
        self, rows: Sequence[Row], feeds: Sequence[Feed], handle: OutputHandler, *, is_chunk: bool = False
    ) -> list[Accepted]:
        """One forward over neighbouring rows, or with `is_chunk` over a whole chunk of one prompt. An error
        ends the rows that it concerns, and no others.
        """
        for row in rows:
            row.start()
        events: list[Accepted] = []
        slots = max(feed.slots for feed in feeds)
        with error_boundary(rows, events):
            output = self._batch.forward(self._batch.active.index(rows[0]), feeds)
        if events:
            return events
        if handle is _accept and self.policy is not None:  # a decode step, not a part of a prompt
            self.policy.record(len(rows), slots, self._batch.step_seconds)
        for i, (row, feed) in enumerate(zip(rows, feeds, strict=True)):
            before = row.cursor
            with error_boundary([row], events):
                if (event := handle(row, output, i, feed)) is not None:
                    events.append(event)
            if row.stem is not None:
                row.stem.moved(before, row.cursor, slots, is_chunk=is_chunk)
        return events

    def _drop_finished(self) -> None:
        """Remove rows that have ended, and close the gaps; decoding rows stay first."""
        batch = self._batch
        self.waiting.drop_finished()
        while ended := [i for i, row in enumerate(batch.active) if row.finish_reason is not None]:
            i = ended[-1]
            batch.keep(i)
            if i < self._num_decoding:
                self._num_decoding -= 1
                self._move(self._num_decoding, i)
                i = self._num_decoding
            for later in range(i + 1, len(batch.active)):
                self._move(later, later - 1)
            batch.active.pop()

    def _move(self, source: int, target: int) -> None:
        """Move a row to another place; it ends if its entries cannot be copied."""
        with error_boundary([self._batch.active[source]], self._failures):
            self._batch.move(source, target)


def _accept(row: Row, output: StepOutput, i: int, feed: Feed) -> Accepted | None:
    return row.commit_and_accept(output, i, feed)


def _commit_chunk(row: Row, _output: StepOutput, _i: int, feed: Feed) -> None:
    """A chunk of a prompt is final; its output is not used."""
    row.cursor += feed.pending
    row.stats.prefill_forwards += 1


def _commit_forced(row: Row, _output: StepOutput, _i: int, feed: Feed) -> None:
    """A chunk of the answer is final; its output is not used."""
    row.cursor += feed.pending
    row.stats.forwards += 1


def run(schedule: Schedule, rows: Sequence[Row]) -> Iterator[list[Accepted]]:
    """Add `rows` and decode until all have ended; yields the events of each forward.

    Between two forwards a row may get a new config, or a finish_reason.
    """
    for row in rows:
        schedule.add(row)
    while not schedule.is_idle:
        yield from schedule.forwards()
