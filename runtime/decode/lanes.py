"""Rows of different lengths within one KV budget: each batch of them has memory of its own."""

from __future__ import annotations

from collections import Counter, abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from .batch import KvBudget
from .limits import Limits
from .queue import Queue
from .schedule import Schedule
from .sequence import Accepted, Sequence

MAX_PASSES = 4  # times max_rows: requests that may pass one that waits for memory


@dataclass(frozen=True, slots=True)
class Lane:
    """A batch of `num_rows` sequences, each of at most `row_bytes` of KV memory."""

    schedule: Schedule
    num_rows: int
    row_bytes: int

    @property
    def seqs(self) -> list[Sequence]:
        """Its sequences, including the ones about to start."""
        return [*self.schedule.running, *self.schedule.waiting]


class Lanes:
    """A schedule within a KV budget, whose sequences join by the memory that each of them needs.

    The sequences of a batch are all as long as the longest. So a sequence joins a batch whose sequences are
    long enough, or it opens one in the memory that is left. Sequences that need at most half of an equal
    share get one batch of as many sequences as possible. A batch of longer sequences takes at most half of
    the memory that is left, but at least one sequence. Rows may pass one that waits for memory, MAX_PASSES
    times as many as `max_rows`; then they wait until it has started. Each batch takes a step of its own.
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
        self._blocked: Sequence | None = None  # the first sequence that waits for memory
        self._num_passes = 0

    @property
    def num_running(self) -> int:
        return sum(lane.schedule.num_running for lane in self._lanes)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + sum(lane.schedule.num_waiting for lane in self._lanes)

    @property
    def num_rows(self) -> int:
        """Sequences that run, and short ones that could start; none could while a sequence waits for
        memory.
        """
        lanes, most = tuple(self._lanes), self.limits.max_rows
        seqs = sum(lane.schedule.num_running for lane in lanes)
        if self._blocked is not None:
            return seqs
        free = sum(lane.num_rows for lane in lanes) - seqs
        return min(most, seqs + free + self._left // self._short)

    @property
    def _left(self) -> int:
        return self._num_bytes - sum(lane.num_rows * lane.row_bytes for lane in tuple(self._lanes))

    @property
    def running(self) -> abc.Sequence[Sequence]:
        """A snapshot of the running sequences, for other threads."""
        return tuple(seq for lane in self._lanes for seq in lane.schedule.running)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self._lanes

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Clients take turns, and the sequences of each start in the order in which they
        were added, except for sequences that wait for memory.
        """
        self.waiting.add(seq)

    def step(self) -> Iterator[list[Accepted]]:
        """One step of each batch; yields the outcomes of each forward."""
        self.waiting.drop_finished()
        self._start_rows()
        for lane in self._lanes:
            yield from lane.schedule.step()
        self._lanes = [lane for lane in self._lanes if not lane.schedule.is_idle]  # frees their memory

    def _start_rows(self) -> None:
        """Give a place to each waiting sequence that has one, in the order of their turns."""
        seqs = [seq for lane in self._lanes for seq in lane.seqs]
        num_rows, clients = len(seqs), Counter(seq.client for seq in seqs if seq.client is not None)
        most = self.limits.max_rows_per_client or self.limits.max_rows
        blocked: Sequence | None = None
        for seq in list(self.waiting):
            if num_rows == self.limits.max_rows:
                return
            if seq.client is not None and clients[seq.client] >= most:
                continue
            lane = self._lane_for(seq, self.limits.max_rows - num_rows)
            if lane is None:
                blocked = blocked or seq
                if blocked is not self._blocked:
                    self._blocked, self._num_passes = blocked, 0
                continue
            if blocked is not None:
                if self._num_passes >= MAX_PASSES * self.limits.max_rows:
                    return
                self._num_passes += 1
            self.waiting.remove(seq)
            lane.schedule.add(seq)
            num_rows += 1
            clients.update([seq.client] if seq.client is not None else [])
        if blocked is None:
            self._blocked = None

    def _lane_for(self, seq: Sequence, places: int) -> Lane | None:
        """A batch with a free sequence for `seq`: the one with the shortest sequences, or a new one; None if
        memory is short. `places`: sequences that may still start.
        """
        need = self.budget.row_bytes(seq)
        free_rows = [
            lane for lane in self._lanes if lane.row_bytes >= need and len(lane.seqs) < lane.num_rows
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
