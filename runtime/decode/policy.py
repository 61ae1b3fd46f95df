"""What the next step feeds, so that tokens come fastest: what rows have shown against what a step costs.
Knows no device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add

from .cost import Cost
from .feed import Feed
from .row import Row
from .split import Splitter

# share of the time that may go into trying more masks than seem to pay, where the next token is always
# certain
TRIALS = 0.015


class Policy:
    """Chooses the masks of the rows of one batch, step by step, for requests that fix no window.

    All those rows get the same number, because a step is a rectangle: rows x the slots of the widest. It is
    the one with the most expected tokens per second, counting that accepted tokens are fed again. Now and
    then a step tries more masks, paid from a share of the time that is set aside for it; otherwise a row that
    went down to no masks would never learn that it has become predictable. The less certain the next tokens
    themselves are, the less is set aside.

    `cost` is called when it is first needed. `few_sizes`: choose among 0, 1, 3, 7, ... and the most, for a
    device that prepares something for each size of a step.
    """

    def __init__(self, cost: Callable[[], Cost], few_sizes: bool = False) -> None:
        self._cost, self._few_sizes = cost, few_sizes
        self._saved = 0.0  # seconds set aside for trials
        self._splitter = Splitter(few_sizes)

    def feeds(self, rows: Sequence[Row], rooms: Sequence[int], block: int) -> list[Feed]:
        """What each row feeds, with at most `rooms` slots behind its known tokens: tau rows first, then exact
        ones.
        """
        feeds = widest_feeds(rows, rooms, block)
        if not any(feed.masks or row.config.exact for feed, row in zip(feeds, rows, strict=True)):
            return feeds  # nothing to choose, and behind a forward each line that is not run counts
        by_tau = [i for i, row in enumerate(rows) if not row.config.exact]
        if any(feeds[i].masks for i in by_tau):
            masks = self.masks([rows[i] for i in by_tau], [feeds[i].masks for i in by_tau])
            for i, m in zip(by_tau, masks, strict=True):
                feeds[i] = Feed(feeds[i].known, feeds[i].proposals, m)
        free = [i for i, row in enumerate(rows) if row.config.exact and row.config.window == "auto"]
        if free:
            others = [feed for i, feed in enumerate(feeds) if i not in free]
            floor = max((feed.slots for feed in others), default=0)
            chances = [rows[i].chances(block, rooms[i]) for i in free]
            for i, feed in zip(
                free, self._splitter.choose(self._cost(), chances, len(others), floor), strict=True
            ):
                # Masks whose proposals could not be used any more are not fed.
                most = max(0, rows[i].remaining - feed.proposals - 2)
                feeds[i] = Feed(feed.known, feed.proposals, min(feed.masks, most))
        return feeds

    def masks(self, rows: Sequence[Row], most: Sequence[int]) -> list[int]:
        """Masks for each row, from 0 to its `most`: exactly that for a row whose request fixes its window."""
        free = [row.config.window == "auto" for row in rows]
        widest = max((m for m, is_free in zip(most, free, strict=True) if is_free), default=0)
        if widest == 0:
            return list(most)
        cost = self._cost()
        expected = [row.pass_rates.expected(m) for row, m in zip(rows, most, strict=True)]

        def fed(masks: int) -> list[int]:
            return [min(masks, m) if is_free else m for m, is_free in zip(most, free, strict=True)]

        def rate(masks: int) -> float:
            # Each row will feed again what it is expected to accept, so that is what the choice costs, not
            # what is pending now.
            tokens = [e[m] for e, m in zip(expected, fed(masks), strict=True)]
            slots = max(t + m for t, m in zip(tokens, fed(masks), strict=True))
            # In this order, and not with sum(), which some versions of Python round otherwise: C++ must
            # choose the same.
            return reduce(add, tokens) / cost.of(len(rows) * slots)

        def seconds(masks: int) -> float:
            return cost.of(
                len(rows) * max(row.num_pending + m for row, m in zip(rows, fed(masks), strict=True))
            )

        choices = self._choices(widest)
        best = max(choices, key=lambda masks: (rate(masks), masks))
        certainty = reduce(add, (row.pass_rates.certainty for row in rows)) / len(rows)
        self._saved = min(self._saved + TRIALS * certainty * seconds(best), seconds(widest))
        trial = next((m for m in choices if m > 2 * best), widest)
        tokens = reduce(add, (e[m] for e, m in zip(expected, fed(trial), strict=True)))
        lost = tokens * (1.0 / rate(trial) - 1.0 / rate(best))
        if trial > best and lost <= self._saved:
            self._saved -= lost
            best = trial
        return fed(best)

    def _choices(self, widest: int) -> list[int]:
        if not self._few_sizes:
            return list(range(widest + 1))
        return sorted({widest, *(2**i - 1 for i in range(widest.bit_length() + 1) if 2**i - 1 <= widest)})


def widest_feeds(rows: Sequence[Row], rooms: Sequence[int], block: int) -> list[Feed]:
    """All known tokens of each row, all its proposals, and as many masks as it may feed and there is room
    for.
    """
    feeds = []
    for row, room in zip(rows, rooms, strict=True):
        proposals = max(0, min(row.num_proposals, room))
        masks = min(row.most_masks(block), room - proposals)
        if row.config.exact or proposals:
            ends = proposals < len(row.proposals) and row.proposals.token_ids[proposals] in row.eos_ids
            masks = 0 if ends else min(masks, row.remaining - proposals - (2 if row.config.exact else 1))
        feeds.append(Feed(row.num_pending, proposals, max(0, masks)))
    return feeds
