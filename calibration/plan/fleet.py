"""Replicas under arrivals, event by event: each steps as decode/schedule.py does, on its own clock. Knows
no bundle and no file."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from ...runtime.decode.cost import Cost
from .steps import Shape, Walker, best_shapes, widest
from .work import Mode, Work

Balance = Literal["least", "random", "turns"]
BALANCES: dict[Balance, str] = {
    "least": "each request goes to the replica with the fewest (nginx least_conn)",
    "random": "each request goes to any replica (a Kubernetes Service)",
    "turns": "the replicas take turns (round robin)",
}


@dataclass(frozen=True, slots=True)
class Machine:
    """A replica: what its steps cost, how many rows it runs, and the prompt tokens it reads between two
    steps. `slower` multiplies every step's cost: what the loop adds to the device."""

    cost: Cost
    block: int
    max_rows: int
    prefill_tokens: int = 128
    slower: float = 1.0


class Replica:
    """A machine with requests in it. Time goes on by whole forwards."""

    def __init__(self, machine: Machine, mode: Mode, shapes: Sequence[Shape]) -> None:
        self.machine, self.mode, self.shapes = machine, mode, shapes
        self.first_shape = widest(mode, machine.block)
        self.clock = 0.0
        self.busy = 0.0
        self.forwards = 0
        self.ends: dict[int, tuple[float, float]] = {}  # request -> first token, last token
        self._first: dict[int, float] = {}
        self._waiting: deque[tuple[int, Walker]] = deque()
        self._rows: list[tuple[int, Walker]] = []
        self._reader: tuple[int, Walker] | None = None

    @property
    def load(self) -> int:
        """Requests that are here."""
        return len(self._waiting) + len(self._rows) + (self._reader is not None)

    def add(self, at: float, number: int, work: Work) -> None:
        """A request comes, not before those that came."""
        self.run(at)
        if not self.load:
            self.clock = max(self.clock, at)
        self._waiting.append((number, Walker(work, self.mode.exact)))

    def run(self, until: float = float("inf")) -> None:
        """All steps that begin before `until`."""
        while self.clock < until and self.load:
            self._step()

    def _step(self) -> None:
        """Prompt pieces within the budget, then one forward over all decoding rows."""
        piece = left = self.machine.prefill_tokens
        while self._admits():
            assert self._reader is not None
            number, row = self._reader
            pending = row.work.prompt_tokens - row.cursor
            size = min(piece - row.cursor % piece, pending)
            if size > left:
                break
            left -= size
            row.cursor += size
            if size < pending:
                self._forward(size)
                continue
            self._reader = None
            self._forward(row.step(self.first_shape, size))
            row.proposals = min(row.proposals, self.machine.block - 1)  # as many as were recorded
            self._first[number] = self.clock
            self._rows.append((number, row))
            self._drop_finished([self._rows[-1]])
        if rows := self._rows:
            shape = self.shapes[len(rows) - 1]
            self._forward(len(rows) * max([row.step(shape) for _, row in rows]))
            self._drop_finished(rows)

    def _admits(self) -> bool:
        """Whether a prompt is being read, or one that waits has room."""
        if self._reader is None and self._waiting and len(self._rows) < self.machine.max_rows:
            self._reader = self._waiting.popleft()
        return self._reader is not None

    def _forward(self, positions: int) -> None:
        seconds = self.machine.cost.of(positions) * self.machine.slower
        self.clock += seconds
        self.busy += seconds
        self.forwards += 1

    def _drop_finished(self, rows: Sequence[tuple[int, Walker]]) -> None:
        done = [number for number, row in rows if row.is_done]
        if done:
            self.ends |= {number: (self._first.pop(number), self.clock) for number in done}
            self._rows = [pair for pair in self._rows if not pair[1].is_done]


@dataclass(frozen=True)
class Run:
    """Requests in their order: seconds from coming to the first and to the last token. `busy` is the share of
    the time in which a replica stepped."""

    first: tuple[float, ...]
    whole: tuple[float, ...]
    busy: float
    seconds: float

    @cached_property
    def percentiles(self) -> tuple[float, float, float]:
        """p50, p95 and p99 of whole answers."""
        p50, p95, p99 = np.percentile(self.whole, (50, 95, 99)).tolist()
        return p50, p95, p99

    @property
    def p95(self) -> float:
        return self.percentiles[1]


class Fleet:
    """Replicas of one kind in one mode; the feeds that pay are found once."""

    def __init__(self, machine: Machine, mode: Mode, works: Sequence[Work]) -> None:
        self.machine, self.mode, self.works = machine, mode, works
        self.shapes = best_shapes(works, mode, machine.block, machine.max_rows, machine.cost)

    @classmethod
    def with_shape(cls, machine: Machine, mode: Mode, works: Sequence[Work]) -> Fleet:
        """One that always feeds full windows, as the record pass does."""
        fleet = cls(machine, Mode(mode.name, False), works)
        fleet.mode, fleet.shapes = mode, [Shape(0, machine.block - 1)] * machine.max_rows
        return fleet

    def replica(self) -> Replica:
        return Replica(self.machine, self.mode, self.shapes)

    def run(
        self,
        times: Sequence[float],
        order: Sequence[int],
        num_replicas: int,
        balance: Balance = "random",
        seed: int = 0,
        skip: int = 0,
    ) -> Run:
        """Request i comes at `times[i]`, rising, and is works[order[i]]. The first `skip` find an emptier
        fleet than later ones, and do not count."""
        replicas = [self.replica() for _ in range(num_replicas)]
        choose = _chooser(balance, replicas, seed)
        for number, (at, which) in enumerate(zip(times, order, strict=True)):
            replicas[choose(number, at)].add(at, number, self.works[which])
        ends: dict[int, tuple[float, float]] = {}
        for replica in replicas:
            replica.run()
            ends |= replica.ends
        counted = range(skip, len(times))
        seconds = max(replica.clock for replica in replicas) - times[0]
        return Run(
            tuple(ends[i][0] - times[i] for i in counted),
            tuple(ends[i][1] - times[i] for i in counted),
            sum(replica.busy for replica in replicas) / (num_replicas * seconds) if seconds else 0.0,
            seconds,
        )

    def capacity(self, order: Sequence[int]) -> float:
        """Requests a second of one replica that never waits for one."""
        run = self.run([0.0] * len(order), order, 1)
        return len(order) / run.seconds

    def alone(self) -> float:
        """p95 where no request meets another."""
        return self.run(
            [i * 1e6 for i in range(len(self.works))], range(len(self.works)), 1, balance="turns"
        ).p95


def _chooser(balance: Balance, replicas: Sequence[Replica], seed: int) -> Callable[[int, float], int]:
    """The number of the replica that a request goes to."""
    if balance == "random":
        draw = random.Random(seed)
        return lambda _number, _at: int(draw.random() * len(replicas))
    if balance == "turns":
        return lambda number, _at: number % len(replicas)

    def least(_number: int, at: float) -> int:
        for replica in replicas:
            replica.run(at)
        return min(range(len(replicas)), key=lambda i: replicas[i].load)

    return least
