"""The feeds of the next step that give the most tokens per second, by estimates and step costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from ..backend import Feed
from .cost import Cost
from .split import TRIALS, Splitter

if TYPE_CHECKING:
    from ..row import Row


class Policy:
    """Chooses the feeds of one batch, step by step.

    Rows in exact mode with the window "auto" are left to a `Splitter`; rows with a fixed window feed the
    widest. All other rows, those with a tau, get the same number of masks, because a step is a rectangle:
    rows x the slots of the widest. It is the number with the most expected tokens per second, counting that
    accepted tokens are fed again. Now and then a step tries more masks, paid from time that is set aside for
    it; otherwise a row that went down to no masks would never learn that its text has become predictable.
    Less time is set aside if the next tokens themselves are less certain.

    `cost` is called for each choice. `record` gets the rows, slots and seconds of each decode step.
    """

    def __init__(
        self, cost: Callable[[], Cost], record: Callable[[int, int, float], None] = lambda *_: None
    ) -> None:
        self._cost, self.record = cost, record
        self._saved = 0.0  # seconds set aside for trials
        self._splitter = Splitter()

    def feeds(self, rows: Sequence[Row], rooms: Sequence[int], block: int) -> list[Feed]:
        """The feed of each row, with at most `rooms` slots after its pending tokens."""
        feeds = [row.widest_feed(room, block) for row, room in zip(rows, rooms, strict=True)]
        if not any(feed.masks or row.config.exact for feed, row in zip(feeds, rows, strict=True)):
            return feeds  # nothing to choose, and time between two forwards is short
        with_tau = [i for i, row in enumerate(rows) if not row.config.exact]
        if any(feeds[i].masks for i in with_tau):
            masks = self.masks([rows[i] for i in with_tau], [feeds[i].masks for i in with_tau])
            for i, m in zip(with_tau, masks, strict=True):
                feeds[i] = Feed(feeds[i].pending, feeds[i].proposals, m)
        exact = [i for i, row in enumerate(rows) if row.config.exact and row.config.window == "auto"]
        if exact:
            others = [feed for i, feed in enumerate(feeds) if i not in exact]
            floor = max((feed.slots for feed in others), default=0)
            forecasts = [rows[i].forecast(block, rooms[i]) for i in exact]
            splits = self._splitter.choose(self._cost(), forecasts, len(others), floor)
            for i, feed in zip(exact, splits, strict=True):
                usable = min(feed.masks, rows[i].usable_masks(feed.proposals))
                feeds[i] = Feed(feed.pending, feed.proposals, usable)
        return feeds

    def masks(self, rows: Sequence[Row], most: Sequence[int]) -> list[int]:
        """Masks of each row, from 0 to its `most`; exactly that for a row whose window is fixed."""
        is_free = [row.config.window == "auto" for row in rows]
        widest = max((m for m, free in zip(most, is_free, strict=True) if free), default=0)
        if widest == 0:
            return list(most)
        cost = self._cost()
        expected = [row.pass_rates.expected(m) for row, m in zip(rows, most, strict=True)]
        choices = {
            number: [min(number, m) if free else m for m, free in zip(most, is_free, strict=True)]
            for number in range(widest + 1)
        }
        speeds = {number: _speed(cost, expected, masks) for number, masks in choices.items()}
        best = max(choices, key=lambda number: (speeds[number], number))
        best_seconds, most_seconds = [
            cost.of(len(rows) * max(row.num_pending + m for row, m in zip(rows, masks, strict=True)))
            for masks in (choices[best], choices[widest])
        ]
        certainty = reduce(add, (row.pass_rates.certainty for row in rows)) / len(rows)
        self._saved = min(self._saved + TRIALS * certainty * best_seconds, most_seconds)
        trial = min(2 * best + 1, widest)
        tokens = reduce(add, (e[m] for e, m in zip(expected, choices[trial], strict=True)))
        loss = tokens * (1.0 / speeds[trial] - 1.0 / speeds[best])
        if trial > best and loss <= self._saved:
            self._saved -= loss
            best = trial
        return choices[best]


def _speed(cost: Cost, expected: Sequence[Sequence[float]], masks: Sequence[int]) -> float:
    """Tokens per second with `masks`: each row feeds its expected tokens and its masks."""
    tokens = [e[m] for e, m in zip(expected, masks, strict=True)]
    slots = max(t + m for t, m in zip(tokens, masks, strict=True))
    return reduce(add, tokens) / cost.of(len(tokens) * slots)
