"""One answer step by step: what a step feeds and what stands after it, as decode/row.py has it; and the feed
that pays best for a number of rows. Knows no arrivals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...runtime.decode.cost import Cost
from .work import Mode, Work


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step feeds behind a row's pending tokens, at most."""

    proposals: int
    masks: int


class Walker:
    """A row on its way through its work."""

    __slots__ = ("at", "cursor", "exact", "pending", "proposals", "work")

    def __init__(self, work: Work, exact: bool) -> None:
        self.work, self.exact = work, exact
        self.cursor = 0  # tokens of the prompt that were read
        self.at = 0  # tokens of the answer
        self.pending = 0  # of them, those that the next step feeds
        self.proposals = 0  # that the next step may feed

    @property
    def is_done(self) -> bool:
        return self.at >= len(self.work.reach)

    def step(self, shape: Shape, known: int | None = None) -> int:
        """Take a step; returns its slots. `known` replaces the pending tokens: the last piece of a prompt."""
        work, at = self.work, self.at
        slots = self.pending if known is None else known
        if not self.exact:
            masks = max(0, min(shape.masks, work.limit - at - 1))
            count = max(1, min(work.reach[at], masks + 1))
            is_end = at in work.ends and count == work.reach[at]
            self.at, self.pending = len(work.reach) if is_end else at + count, count
            return slots + masks
        most = len(work.reach) - 1 - at  # none that ends the answer: the output before it says as much
        fed = max(0, min(shape.proposals, self.proposals, most))
        masks = max(0, min(shape.masks, work.limit - at - fed - 2))
        held = min(fed, work.reach[at - 1] - 1) if fed else 0
        self.at, self.pending = at + held + 1, 1
        self.proposals = masks if held == fed else 0
        return slots + fed + masks


def widest(mode: Mode, block: int) -> Shape:
    """What the last piece of a prompt feeds."""
    return Shape(0, 0 if mode.one_token else block + 1 if mode.exact else block - 1)


def best_shapes(works: Sequence[Work], mode: Mode, block: int, max_rows: int, cost: Cost) -> list[Shape]:
    """For 1, 2, ... `max_rows` rows the feed with the most tokens a second over all of the work.

    The runtime decides step by step and row by row, and does no worse. Nothing wider than a block was
    recorded, so nothing wider is chosen.
    """
    if mode.one_token:
        return [Shape(0, 0)] * max_rows
    masks = range(block)
    choices = [Shape(p, m) for m in masks for p in (range(m + 1) if mode.exact else (0,))]
    walks = [(shape, *_walk(works, mode, block, shape)) for shape in choices]

    def rate(rows: int, tokens: int, slots: Counter[int]) -> float:
        return rows * tokens / slots.total() / cost.of(rows * _widest_of(rows, slots))

    # A batch is a rectangle: all rows take the slots of the widest.
    return [max(walks, key=lambda w: rate(n, w[1], w[2]))[0] for n in range(1, max_rows + 1)]


def _walk(works: Sequence[Work], mode: Mode, block: int, shape: Shape) -> tuple[int, Counter[int]]:
    """Tokens of all decode steps with a feed, and how many of these steps had how many slots."""
    tokens, slots = 0, Counter[int]({1: 1})
    for work in works:
        row = Walker(work, mode.exact)
        row.step(widest(mode, block), 0)
        row.proposals = min(row.proposals, block - 1)
        while not row.is_done:
            before = row.at
            slots[row.step(shape)] += 1
            tokens += row.at - before if mode.exact else row.pending
    return max(tokens, 1), slots


def _widest_of(rows: int, slots: Counter[int]) -> float:
    """The mean of the widest of so many rows, each drawn from `slots`."""
    total, below, mean = slots.total(), 0, 0.0
    for size in sorted(slots):
        share = below / total
        below += slots[size]
        mean += size * ((below / total) ** rows - share**rows)
    return mean
