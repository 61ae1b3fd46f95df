"""The decoding loop: continuous batching, one step at a time. Knows rows and the device; no threads, no text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import SessionError
from .backend import Backend, StepOutput
from .batch import Batch
from .feed import Feed
from .policy import Policy, widest_feeds
from .row import Accepted, Row

PREFILL_CHUNK = 256  # prompt tokens of one prefill forward where nobody else waits

Take = Callable[[Row, StepOutput, int, Feed], "Accepted | None"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much runs at once. Raises SessionError for values below 1.

    max_rows: sequences in one forward; KV memory is allocated for as many, each as long as the longest needs.
    max_waiting: requests that may wait for a row. prefill_tokens: prompt tokens that are prefilled between two
    decode steps, at most: more lets a new request answer sooner, less disturbs the running ones less.
    """

    max_rows: int = 8
    max_waiting: int = 64
    prefill_tokens: int = 128

    def __post_init__(self) -> None:
        wrong = [
            f"{name} must be 1 or more, not {getattr(self, name)!r}"
            for name in self.__slots__
            if getattr(self, name) < 1
        ]
        if wrong:
            raise SessionError("; ".join(wrong))

    @classmethod
    def of_rows(cls, num_rows: int) -> Limits:
        """For rows that nobody else waits for."""
        return cls(num_rows, prefill_tokens=PREFILL_CHUNK)


class Schedule:
    """Rows that run, in neighbouring KV rows: the decoding ones first, then at most one whose prompt is being read.

    A decode step feeds [known | proposals | masks] from each row's own cursor: the known tokens' KV become final in
    the same forward that verifies the proposals and makes the next predictions (paper: "cursor-based cache
    management"). The last piece of a prompt carries masks too, so the first step already yields a run.
    """

    def __init__(
        self, backend: Backend, block: int, mask_id: int, limits: Limits, policy: Policy | None = None
    ) -> None:
        self.backend, self.block, self.mask_id = backend, block, mask_id
        self.limits, self.policy = limits, policy
        self.waiting: deque[Row] = deque()
        self._batch = Batch(backend, limits.max_rows, mask_id)
        self._num_decoding = 0

    @property
    def num_running(self) -> int:
        return len(self._batch.active)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self._batch.active

    def add(self, row: Row) -> None:
        """Queue a row; rows get their turn in the order in which they were added."""
        self.waiting.append(row)

    def step(self) -> list[Accepted]:
        """Prompt pieces within the budget, then one forward over all decoding rows: what each row got.

        A row whose finish_reason was set from outside leaves before anything else happens.
        """
        return [event for events in self.forwards() for event in events]

    def forwards(self) -> Iterator[list[Accepted]]:
        """The forwards of one step, each as it is run; nothing accepted for a piece of a prompt but the last."""
        self._drop_finished()
        yield from self._prompt_pieces()
        self._drop_finished()
        if (rows := self._decoding()) and (events := self._decode(rows)):
            yield events
        self._drop_finished()
        if not self._batch.active and self._batch.cache.capacity:
            # Gives the KV memory of the longest row back.
            self._batch = Batch(self.backend, self.limits.max_rows, self.mask_id)

    # --- the parts of a step ---

    def _prompt_pieces(self) -> Iterator[list[Accepted]]:
        budget = min(self.limits.prefill_tokens, self.backend.max_slots or self.limits.prefill_tokens)
        left = budget
        # Pieces of one size, whoever reads beside: the same prompt takes the same forwards.
        while (row := self._reading()) is not None and (piece := min(budget, row.num_pending)) <= left:
            if (event := row.begin(self.backend.max_capacity)) is not None:
                yield [event]
                self._drop_finished()
                continue
            left -= piece
            if piece < row.num_pending:
                yield self._run([row], [Feed(piece)], _read)
            else:
                feed = self._first_feed(row)
                self._num_decoding += 1
                if events := self._run([row], [feed], self._take_first):
                    yield events
            self._drop_finished()

    def _reading(self) -> Row | None:
        """The row whose prompt is being read: the next that waits, if there is room."""
        active = self._batch.active
        if self._num_decoding == len(active) and self.waiting and len(active) < self.limits.max_rows:
            active.append(self.waiting.popleft())
        return active[-1] if self._num_decoding < len(active) else None

    def _decoding(self) -> list[Row]:
        return self._batch.active[: self._num_decoding]

    def _decode(self, rows: list[Row]) -> list[Accepted]:
        ended = [row.finish("capacity") for row in rows if not self._batch.fits(row)]
        self._drop_finished()
        ended += self._catch_up(self._decoding())
        rows = self._decoding()
        return ended + (self._run(rows, self._feeds(rows), Row.take) if rows else [])

    def _catch_up(self, rows: Sequence[Row]) -> list[Accepted]:
        """More forced tokens than a step holds are fed first, in pieces of which nothing is asked."""
        most = max(self.limits.prefill_tokens, 2 * self.block)
        most = min(most, self.backend.max_slots or most)
        failed: list[Accepted] = []
        for row in rows:
            while row.guide is not None and row.num_pending > most and row.finish_reason is None:
                failed += self._run([row], [Feed(most)], _fed)
        self._drop_finished()
        return failed

    def _first_feed(self, row: Row) -> Feed:
        """The last piece of a prompt: a full window, since all the prompt is fed with it."""
        return widest_feeds([row], [self._batch.room(row)], self.block)[0]

    def _take_first(self, row: Row, output: StepOutput, i: int, feed: Feed) -> Accepted | None:
        return row.take(output, i, feed)

    def _feeds(self, rows: Sequence[Row]) -> list[Feed]:
        rooms = [self._batch.room(row) for row in rows]
        for row, room in zip(rows, rooms, strict=True):
            row.look_around(room)
        if self.policy is None:
            return widest_feeds(rows, rooms, self.block)
        return self.policy.feeds(rows, rooms, self.block)

    def _run(self, rows: Sequence[Row], feeds: Sequence[Feed], take: Take) -> list[Accepted]:
        """One forward over neighbouring rows; what fails ends the rows that it concerns, and no others."""
        for row in rows:
            row.stats.starts()
        try:
            output = self._batch.forward(self._batch.active.index(rows[0]), feeds)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a library's panic is no Exception
            return [row.fail(error) for row in rows]
        events: list[Accepted] = []
        for i, (row, feed) in enumerate(zip(rows, feeds, strict=True)):
            try:
                event = take(row, output, i, feed)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                event = row.fail(error)
            if event is not None:
                events.append(event)
        return events

    def _drop_finished(self) -> None:
        """Let finished rows go, and close the gaps: decoding rows stay first and neighbours."""
        self.waiting = deque(row for row in self.waiting if row.finish_reason is None)
        batch = self._batch
        for i in reversed(range(len(batch.active))):
            if batch.active[i].finish_reason is None:
                continue
            if i < self._num_decoding:
                self._num_decoding -= 1
                batch.move(self._num_decoding, i)
                i = self._num_decoding
            batch.move(len(batch.active) - 1, i)
            batch.active.pop()


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
    """Decode `rows` side by side; yields what each forward gave, nothing for a piece of a prompt but the last.

    A row may be given a new config, or a finish_reason from outside, between two forwards. `policy` chooses the
    feeds of rows whose window is not fixed; without one they get full windows. What fails is an event with an error.
    """
    schedule = Schedule(
        backend, block, mask_id, Limits(max(1, len(rows)), prefill_tokens=PREFILL_CHUNK), policy
    )
    yield from run(schedule, rows)


def run(schedule: Schedule, rows: Sequence[Row]) -> Iterator[list[Accepted]]:
    """Add `rows` and step until all have ended."""
    for row in rows:
        schedule.add(row)
    while not schedule.is_idle:
        yield from schedule.forwards()
