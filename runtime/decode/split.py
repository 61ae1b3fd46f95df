"""How a verifying step is split: which proposals it feeds, and how many masks behind them. Knows no device
and no tokens.

The choice maximizes what is expected of this step and of the masks' proposals in the next one, against what
the slots cost at the speed that the rows have shown (the relative value of an average-reward decision
process).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

from .cost import Cost
from .feed import Feed

TRIALS = 0.015  # share of the time that may go into more masks than seem to pay


@dataclass(frozen=True, slots=True)
class Chances:
    """What one row may feed and what it may expect of it.

    known: tokens that are fed in any case. hopes: of each proposal that may be fed, given those before it.
    ending: of an end-of-sequence token proposed right behind them; None if none was. worth[m]: proposals of m
    masks that are expected to hold, for 0, 1, ... as many masks as may be fed. room: slots behind the known
    tokens.
    """

    known: int
    hopes: tuple[float, ...]
    ending: float | None
    worth: tuple[float, ...]
    room: int

    @property
    def most_masks(self) -> int:
        return len(self.worth) - 1

    def all_hold(self, masks: int) -> float:
        """How likely all proposals of so many masks hold."""
        return self.worth[masks] - self.worth[masks - 1] if masks else 1.0


class Splitter:
    """Chooses the feeds of rows that verify, step by step; all rows share a width, because a step is a
    rectangle.
    """

    def __init__(self, few_sizes: bool = False) -> None:
        self._few_sizes = few_sizes
        self._saved = 0.0  # seconds set aside for trials

    def choose(self, cost: Cost, rows: Sequence[Chances], others: int = 0, floor: int = 0) -> list[Feed]:
        """Feeds for `rows`; `others` more rows take part in a step of at least `floor` slots."""
        num = len(rows) + others
        widest = max(row.known + min(row.room, len(row.hopes) + row.most_masks) for row in rows)
        prices = [cost.of(num * max(width, floor)) for width in range(widest + 2)]
        speed = self._speed(cost, rows, num, others)
        splits = [_splits(row, widest, cost, speed, num) for row in rows]
        least = max(row.known for row in rows)
        best, best_value = least, -1e300
        for width in self._widths(least, widest):
            value = reduce(add, (split[width][0] for split in splits)) - speed * prices[width]
            if value > best_value:
                best, best_value = width, value
        self._saved = min(self._saved + TRIALS * prices[best], prices[widest])
        feeds = [split[best][1] for split in splits]
        return self._trial(rows, feeds, cost, num, floor)

    def _trial(
        self, rows: Sequence[Chances], feeds: list[Feed], cost: Cost, num: int, floor: int
    ) -> list[Feed]:
        """About twice the masks, where what was set aside pays for them: masks that are not fed teach
        nothing.
        """
        wide = [_wider(row, feed) for row, feed in zip(rows, feeds, strict=True)]
        width = max(floor, *(feed.slots for feed in feeds))
        width_of_trial = max(floor, *(feed.slots for feed in wide))
        lost = cost.of(num * width_of_trial) - cost.of(num * width)
        if wide == feeds or lost > self._saved:
            return feeds
        self._saved -= lost
        return wide

    @staticmethod
    def _speed(cost: Cost, rows: Sequence[Chances], num: int, others: int) -> float:
        """Tokens a second if all goes on as it is: a step feeds its masks and the proposals of the last one,
        and where those fail, the step after it has none.
        """
        best = 0.0
        worths = [row.worth for row in rows]
        for masks in range(max(map(len, worths))):
            tokens, held = 0.0 + others, 0.0
            for worth in worths:
                m = masks if masks < len(worth) else len(worth) - 1
                kept = worth[m]
                failing = 1.0 - (kept - worth[m - 1] if m else 1.0)  # 1 - all_hold
                tokens += (1.0 + kept + failing) / (1.0 + failing)
                if kept > held:
                    held = kept
            speed = tokens / cost.of(num * (1.0 + masks + held))
            if speed > best:
                best = speed
        return best

    def _widths(self, least: int, widest: int) -> list[int]:
        if not self._few_sizes:
            return list(range(least, widest + 1))
        sizes = {2**i for i in range(widest.bit_length())}
        return sorted({least, widest, *(size for size in sizes if least < size < widest)})


def _splits(row: Chances, widest: int, cost: Cost, speed: float, num: int) -> list[tuple[float, Feed]]:
    """For each width of the step, the best value of this row and the feed that has it."""
    one = cost.of(num)
    # What m masks are worth in the next step: the tokens that will hold, less what feeding them costs; and
    # where one fails, the step after it has no proposals and lacks as much.
    later, masks_of = [0.0], [0]
    for m in range(1, len(row.worth)):
        held = row.worth[m]
        value = (held - speed * (cost.of(num * (1.0 + m)) - one) / num) / (2.0 - row.all_hold(m))
        masks_of.append(m if value > later[masks_of[-1]] else masks_of[-1])
        later.append(value)
    chances, tokens = [1.0], [1.0]
    for hope in row.hopes:
        chances.append(chances[-1] * hope)
        tokens.append(tokens[-1] + chances[-1])
    ending = 0.0 if row.ending is None else row.ending
    # Where an end is in sight, proposals that are left out have to be fed after all: one more step.
    num_hopes = len(row.hopes)
    rest = [0.0] * (num_hopes + 1)
    if ending:
        rest[1:] = [left - speed * cost.of(num * (1.0 + left)) / num for left in range(1, num_hopes + 1)]
    most_masks, known, room, going_on = row.most_masks, row.known, row.room, 1.0 - ending
    best = [(tokens[0], Feed(known))] * (known + 1)
    for space in range(1, widest - known + 1):
        if space > room:
            best.append(best[-1])
            continue
        top, proposals, masks = -1e300, 0, 0
        for p in range((space if space < num_hopes else num_hopes) + 1):
            left = space - p
            m = masks_of[left if left < most_masks else most_masks]
            value = tokens[p] + chances[p] * (going_on * later[m] + ending * rest[num_hopes - p])
            if value > top:
                top, proposals, masks = value, p, m
        best.append((top, Feed(known, proposals, masks)))
    return best


def _wider(row: Chances, feed: Feed) -> Feed:
    if row.ending is not None:
        return feed
    masks = min(2 * feed.masks + 1, row.most_masks, row.room - feed.proposals)
    return Feed(feed.known, feed.proposals, max(masks, feed.masks))
