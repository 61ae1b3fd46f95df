"""Rows of different lengths within one KV budget: each batch of them has memory of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from .batch import KvBudget
from .queue import Queue
from .row import Accepted, Row
from .schedule import Limits, Schedule

MAX_PASSES = 4  # times max_rows: requests that may pass one that waits for memory


@dataclass(frozen=True, slots=True)
class Lane:
    """A batch of `num_rows` rows, each of at most `row_bytes` of KV memory."""

    schedule: Schedule
    num_rows: int
    row_bytes: int

    @property
    def rows(self) -> list[Row]:
        """Its rows, with those that are about to start."""
        return [*self.schedule.running, *self.schedule.waiting]


class Lanes:
    """A schedule within a KV budget, whose rows join by the memory that each of them needs.

    The rows of a batch are all as long as the longest. So a row joins a batch whose rows are long enough, or
    it opens one in the memory that is left. Rows that need at most half of an equal share get one batch of as
    many rows as possible. A batch of longer rows takes at most half of the memory that is left, but at least
    one row. Rows may pass one that waits for memory, MAX_PASSES times as many as `max_rows`; then they wait
    until it has started. Each batch takes a step of its own.
    """

    def __init__(
        self, limits: Limits, budget: KvBudget, open_schedule: Callable[[Limits, KvBudget], Schedule]
    ) -> None:
        assert budget.num_bytes is not None
        self.limits, self.budget, self._num_bytes = limits, budget, budget.num_bytes
        self.waiting = Queue()
        self._short = max(1, budget.short_bytes)
        self._open_schedule = open_schedule
        self._lanes: list[Lane] = []
        self._blocked: Row | None = None  # the first row that waits for memory
        self._num_passes = 0

    @property
    def num_running(self) -> int:
        return sum(lane.schedule.num_running for lane in self._lanes)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + sum(lane.schedule.num_waiting for lane in self._lanes)

    @property
    def num_rows(self) -> int:
        """Rows that run, and short ones that could start; none could while a row waits for memory."""
        lanes, most = tuple(self._lanes), self.limits.max_rows
        rows = sum(lane.schedule.num_running for lane in lanes)
        if self._blocked is not None:
            return rows
        free = sum(lane.num_rows for lane in lanes) - rows
        return min(most, rows + free + self._left // self._short)

    @property
    def _left(self) -> int:
        return self._num_bytes - sum(lane.num_rows * lane.row_bytes for lane in tuple(self._lanes))

    @property
    def running(self) -> Sequence[Row]:
        """A snapshot of the running rows, for other threads."""
        return tuple(row for lane in self._lanes for row in lane.schedule.running)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self._lanes

    def add(self, row: Row) -> None:
        """Queue a row. Clients take turns, and the rows of each start in the order in which they were added,
        except for rows that wait for memory.
        """
        self.waiting.add(row)

    def iterate(self) -> list[Accepted]:
        """One whole iteration; returns its events."""
        return [event for events in self.forwards() for event in events]

    def forwards(self) -> Iterator[list[Accepted]]:
        """The forwards of one iteration of each batch."""
        self.waiting.drop_finished()
        self._start_rows()
        for lane in self._lanes:
            yield from lane.schedule.forwards()
        self._lanes = [lane for lane in self._lanes if not lane.schedule.is_idle]  # frees their memory

    def _start_rows(self) -> None:
        """Give a place to each waiting row that has one, in the order of their turns."""
        rows = [row for lane in self._lanes for row in lane.rows]
        num_rows, clients = len(rows), Counter(row.client for row in rows if row.client is not None)
        most = self.limits.max_rows_per_client or self.limits.max_rows
        blocked: Row | None = None
        for row in list(self.waiting):
            if num_rows == self.limits.max_rows:
                return
            if row.client is not None and clients[row.client] >= most:
                continue
            lane = self._lane_for(row, self.limits.max_rows - num_rows)
            if lane is None:
                blocked = blocked or row
                if blocked is not self._blocked:
                    self._blocked, self._num_passes = blocked, 0
                continue
            if blocked is not None:
                if self._num_passes >= MAX_PASSES * self.limits.max_rows:
                    return
                self._num_passes += 1
            self.waiting.remove(row)
            lane.schedule.add(row)
            num_rows += 1
            clients.update([row.client] if row.client is not None else [])
        if blocked is None:
            self._blocked = None

    def _lane_for(self, row: Row, places: int) -> Lane | None:
        """A batch with a free row for `row`: the one with the shortest rows, or a new one; None if memory is
        short. `places`: rows that may still start.
        """
        need = self.budget.row_bytes(row)
        free_rows = [
            lane for lane in self._lanes if lane.row_bytes >= need and len(lane.rows) < lane.num_rows
        ]
        if free_rows:
            return min(free_rows, key=lambda lane: lane.row_bytes)
        left, short = self._left, self._short
        if need <= short <= left:
            lane = self._open(min(places, left // short), short)
        elif need <= left:
            shared = left if self.budget.fixed else left // 2
            lane = self._open(max(1, min(places, shared // need)), need)
        else:
            return None
        return lane

    def _open(self, num_rows: int, row_bytes: int) -> Lane:
        limits = replace(self.limits, max_rows=num_rows)
        budget = replace(self.budget, max_rows=num_rows, num_bytes=num_rows * row_bytes)
        lane = Lane(self._open_schedule(limits, budget), num_rows, row_bytes)
        self._lanes.append(lane)
        return lane
