"""The decoding loop: continuous batching, one step at a time. Knows no threads and no text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated

from ..errors import SessionError
from ..rules import broken, integer, number
from .backend import Backend, StepOutput
from .batch import Batch
from .budget import KvBudget
from .config import GenerationConfig
from .failing import Failing
from .feed import Feed
from .policy import Policy, widest_feeds
from .queue import Queue
from .row import Accepted, Row

PREFILL_CHUNK = 256  # prompt tokens of one prefill forward where nobody else waits

MOST_PLACES = 2**20
Count = Annotated[int, integer(1, "1 or more")]
Most = Annotated[int | None, integer(1, "1 or more")]

Take = Callable[[Row, StepOutput, int, Feed], "Accepted | None"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much runs at once, and how much one request may ask for; None is no limit. Raises SessionError for
    values that cannot be.

    max_rows: sequences in one forward; KV memory is allocated for as many, each as long as the longest needs.
    max_waiting: requests that may wait, beside those that free rows are about to take. prefill_tokens: prompt
    tokens that are prefilled between two decode steps, at most: more lets a new request answer sooner, less
    disturbs the running ones less.

    max_prompt_tokens, max_new_tokens: longest prompt and answer. max_stops: stop strings, and eos_ids.
    kv_bytes: KV memory of the whole batch; a long request waits until fewer rows, at least its own, fit in.
    client_share: of all places, rows and waiting ones, what one client may have, above 0, at most 1.
    max_rows_per_client: sequences of one client in one forward; its others wait, also where rows are free.
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
        wrong = list(broken(self).values())
        for name in ("max_rows", "max_waiting"):
            if not wrong and getattr(self, name) > MOST_PLACES:
                wrong.append(f"{name} must be at most {MOST_PLACES}, not {getattr(self, name)!r}")
        if wrong:
            raise SessionError("; ".join(wrong))

    @property
    def max_of_client(self) -> int:
        """Requests that one client may have here."""
        return max(1, int(self.client_share * (self.max_rows + self.max_waiting)))

    def check(self, config: GenerationConfig) -> None:
        """Raise SessionError when `config` asks for more than is given here."""
        asked = [
            ("max_new_tokens", "max_new_tokens", config.max_new_tokens, self.max_new_tokens),
            ("stop", "stop strings", len(config.stop), self.max_stops),
            ("eos_ids", "eos_ids", len(config.eos_ids or ()), self.max_stops),
        ]
        wrong = {
            field: f"{number} {name} are asked for, this service gives at most {most}; ask for fewer"
            for field, name, number, most in asked
            if most is not None and number > most
        }
        if wrong:
            raise SessionError("; ".join(wrong.values()), code="limit_exceeded", field=next(iter(wrong)))

    @classmethod
    def of_rows(cls, num_rows: int) -> Limits:
        """For rows that nobody else waits for."""
        return cls(num_rows, prefill_tokens=PREFILL_CHUNK)


class Schedule:
    """Rows that run, in neighbouring KV rows: the decoding ones first, then those whose prompts are being
    read, shorter ones before longer ones.

    A decode step feeds [known | proposals | masks] from each row's own cursor: the known tokens' KV become
    final in the same forward that verifies the proposals and makes the next predictions (paper: "cursor-based
    cache management"). The last piece of a prompt carries masks too, so the first step already yields a run.
    `budget` is of the KV memory, none for as much as comes.
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
        # Pieces of one size, whoever reads beside: the same prompt takes the same forwards.
        self._piece = min(limits.prefill_tokens, backend.max_slots or limits.prefill_tokens)
        self._turn = 0  # of the prompts that are being read
        self._lost: list[Accepted] = []  # of rows whose entries could not be moved

    @property
    def num_running(self) -> int:
        return len(self._batch.active)

    @property
    def num_rows(self) -> int:
        """Rows that those who come find: fewer than `max_rows` while long ones fill the KV memory."""
        return self._batch.num_rows if self._batch.active else self.limits.max_rows

    @property
    def running(self) -> Sequence[Row]:
        """The rows that have a place, as another thread may see them: a moment old."""
        return tuple(self._batch.active)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self._batch.active

    def add(self, row: Row) -> None:
        """Queue a row. Clients take turns, and the rows of each get theirs in the order in which they were
        added; only while a long prompt is being read may a shorter one come before those that wait.
        """
        self.waiting.add(row)

    def step(self) -> list[Accepted]:
        """Prompt pieces within the budget, then one forward over all decoding rows: what each row got.

        A row whose finish_reason was set from outside leaves before anything else happens.
        """
        return [event for events in self.forwards() for event in events]

    def forwards(self) -> Iterator[list[Accepted]]:
        """The forwards of one step, each as it is run; nothing for a prompt's pieces but the last."""
        self._drop_finished()
        yield from self._prompt_pieces()
        self._drop_finished()
        yield from self._pending_piece()
        if (rows := self._decoding()) and (events := self._decode(rows)):
            yield events
        self._drop_finished()
        if self._lost:
            yield self._lost
            self._lost = []
        if not self._batch.active and self._batch.cache.capacity:
            # Gives the KV memory of the longest row back.
            self._batch = Batch(self.backend, self._batch.num_rows, self.mask_id)

    # --- the parts of a step ---

    def _prompt_pieces(self) -> Iterator[list[Accepted]]:
        left = self._piece
        while (row := self._reading()) is not None and (piece := self._next_piece(row)) <= left:
            if events := self._begin(row):
                yield events
                self._drop_finished()
                continue
            left -= piece
            self._turn += 1
            if piece < row.num_pending:
                yield self._run([row], [Feed(piece)], _read)
            else:
                feed = self._first_feed(row)
                self._num_decoding += 1
                events = self._run([row], [feed], self._take_first)
                self._batch.keep(self._num_decoding - 1)  # now: the next prompt may begin alike
                if events:
                    yield events
            self._drop_finished()

    def _next_piece(self, row: Row) -> int:
        """Up to where a piece ends in any case: a row that began with saved entries goes on as others do."""
        return min(self._piece - row.cursor % self._piece, row.num_pending)

    def _num_pieces(self, row: Row) -> int:
        """Pieces that are left of its prompt."""
        return -(-len(row.tokens) // self._piece) - row.cursor // self._piece

    def _reading(self) -> Row | None:
        """The row whose prompt is read next: the first and the last take turns.

        The first is the shortest and ends first, as decoding rows are neighbours: the last piece of another
        waits for it.
        """
        self._admit()
        self._drop_finished()
        readers = self._batch.active[self._num_decoding :]
        if not readers:
            return None
        is_lasts_turn = self._turn % 2 == 1 and self._num_pieces(readers[-1]) > 1
        return readers[-1] if is_lasts_turn else readers[0]

    def _admit(self) -> None:
        """Let a row in if there is room: the next that waits, or beside prompts that are being read the first
        that has at most half the pieces of them all. It begins with what is saved of its prompt.
        """
        first = self._num_decoding
        readers = self._batch.active[first:]
        if not readers:
            row = next(self._welcome(), None)
        elif self._num_pieces(readers[-1]) <= 1:
            return  # its last piece waits for the others
        else:
            left = self._num_pieces(readers[0])
            row = next((r for r in self._welcome() if 2 * self._num_pieces(r) <= left), None)
        if row is None or not self._has_room(row):
            return
        self.waiting.take(row)
        active = self._batch.active
        active.append(row)
        for i in range(len(active) - 1, first, -1):
            self._move(i - 1, i)
        active[first] = row
        self._batch.recall(first, self._piece, self.budget.most_entries(self._batch.num_rows))

    def _welcome(self) -> Iterator[Row]:
        """Rows that wait, in the order of their turns, but those of clients that have their rows already."""
        most = self.limits.max_rows_per_client
        if most is None:
            return iter(self.waiting)
        running = Counter(row.client for row in self._batch.active if row.client is not None)
        return (row for row in self.waiting if running[row.client] < most)

    def _has_room(self, row: Row) -> bool:
        """Whether `row` may join: a batch has as many rows as the KV memory gives to its longest; before it
        gets another number it runs empty.
        """
        active = self._batch.active
        num_rows = self.budget.num_rows([*active, row])
        if not active and num_rows != self._batch.num_rows:
            self._batch = Batch(self.backend, num_rows, self.mask_id)
        return len(active) < num_rows == self._batch.num_rows

    def _decoding(self) -> list[Row]:
        return self._batch.active[: self._num_decoding]

    def _decode(self, rows: list[Row]) -> list[Accepted]:
        events = [row.finish("capacity") for row in rows if not self._batch.fits(row)]
        for row in rows:
            if row.proposer is not None and not self._is_behind(row):
                with Failing([row], events):
                    row.look_around(self._batch.room(row))
        if events:
            self._drop_finished()
            rows = self._decoding()
        for is_behind, neighbours in groupby(rows, self._is_behind):
            if is_behind:
                continue
            together, feeds = list(neighbours), list[Feed]()
            with Failing(together, events):
                feeds = self._feeds(together)
            if feeds:
                events += self._run(together, feeds, _take)
        return events

    def _begin(self, row: Row) -> list[Accepted]:
        """What is known of a row's answer before any prediction."""
        events: list[Accepted] = []
        with Failing([row], events):
            if (event := row.begin(self.backend.max_capacity)) is not None:
                events.append(event)
        return events

    @property
    def _most_known(self) -> int:
        """Tokens of an answer that a step feeds at once."""
        most = max(self.limits.prefill_tokens, 2 * self.block)
        return min(most, self.backend.max_slots or most)

    def _is_behind(self, row: Row) -> bool:
        """Whether more tokens are pending than a step feeds, such as a long forced text: they come first."""
        return row.num_pending > self._most_known and self._batch.fits(row)

    def _pending_piece(self) -> Iterator[list[Accepted]]:
        """One piece of a row that is behind, without outputs; the other rows decode meanwhile."""
        row = next(filter(self._is_behind, self._decoding()), None)
        if row is not None:
            yield self._run([row], [Feed(self._most_known)], _fed)
            self._drop_finished()

    def _first_feed(self, row: Row) -> Feed:
        """The last piece of a prompt: a full window, since all the prompt is fed with it."""
        return widest_feeds([row], [self._batch.room(row)], self.block)[0]

    def _take_first(self, row: Row, output: StepOutput, i: int, feed: Feed) -> Accepted | None:
        return _take(row, output, i, feed)

    def _feeds(self, rows: Sequence[Row]) -> list[Feed]:
        rooms = [self._batch.room(row) for row in rows]
        if self.policy is None:
            return widest_feeds(rows, rooms, self.block)
        return self.policy.feeds(rows, rooms, self.block)

    def _run(self, rows: Sequence[Row], feeds: Sequence[Feed], take: Take) -> list[Accepted]:
        """One forward over neighbouring rows; what fails ends the rows that it concerns, and no others."""
        for row in rows:
            row.start()
        events: list[Accepted] = []
        slots = max(feed.slots for feed in feeds)
        with Failing(rows, events):
            output = self._batch.forward(self._batch.active.index(rows[0]), feeds)
        if events:
            return events
        for i, (row, feed) in enumerate(zip(rows, feeds, strict=True)):
            before = row.cursor
            with Failing([row], events):
                if (event := take(row, output, i, feed)) is not None:
                    events.append(event)
            if row.stem is not None:
                row.stem.saw(before, row.cursor, slots, is_piece=take is _read)
        return events

    def _drop_finished(self) -> None:
        """Let finished rows go, and close the gaps: decoding rows stay first and neighbours, readers in
        order.
        """
        batch = self._batch
        self.waiting.drop_finished()
        while ended := [i for i, row in enumerate(batch.active) if row.finish_reason is not None]:
            i = ended[-1]
            batch.keep(i)
            if i < self._num_decoding:
                self._num_decoding -= 1
                self._move(self._num_decoding, i)
                i = self._num_decoding
            for behind in range(i + 1, len(batch.active)):
                self._move(behind, behind - 1)
            batch.active.pop()

    def _move(self, source: int, target: int) -> None:
        """Give a row another place, or end it if its entries cannot be copied."""
        with Failing([self._batch.active[source]], self._lost):
            self._batch.move(source, target)


def _take(row: Row, output: StepOutput, i: int, feed: Feed) -> Accepted | None:
    """What a row does with its outputs, the recording row of calibration another thing than the others."""
    return row.take(output, i, feed)


def _read(row: Row, _output: StepOutput, _i: int, feed: Feed) -> None:
    """A piece of a prompt is final; nothing was asked of it."""
    row.cursor += feed.known
    row.stats.prefill_forwards += 1


def _fed(row: Row, _output: StepOutput, _i: int, feed: Feed) -> None:
    """Tokens of an answer are final; nothing was asked of them."""
    row.cursor += feed.known
    row.stats.forwards += 1


def decode(
    backend: Backend, rows: Sequence[Row], block: int, mask_id: int, policy: Policy | None = None
) -> Iterator[list[Accepted]]:
    """Decode `rows` side by side; yields what each forward gave, nothing for a piece of a prompt but the
    last.

    A row may be given a new config, or a finish_reason from outside, between two forwards. `policy` chooses
    the feeds of rows whose window is not fixed; without one they get full windows. What fails is an event
    with an error.
    """
    limits = Limits(max(1, len(rows)), prefill_tokens=PREFILL_CHUNK)
    yield from run(Schedule(backend, block, mask_id, limits, policy), rows)


def run(schedule: Schedule, rows: Sequence[Row]) -> Iterator[list[Accepted]]:
    """Add `rows` and step until all have ended."""
    for row in rows:
        schedule.add(row)
    while not schedule.is_idle:
        yield from schedule.forwards()
