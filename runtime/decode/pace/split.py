"""How a verifying step is split into proposals and masks, in exact mode.

The choice maximizes the expected tokens of this step plus the value of its masks' proposals in the next step,
less the time of the slots at the speed that the rows have reached (the relative value of an average-reward
decision process; docs/decoding.md, "How much to feed"; its T is `tokens`, H `all_accepted`, W `expected`, V
`mask_values`, R `speed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import add, mul

from ..backend import Feed
from .cost import Cost

TRIALS = 0.015  # share of the time for more masks than seem to pay


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one row may feed, and what it may expect of that.

    pending: tokens that are fed in any case.
    probabilities: the acceptance probability of each proposal if those before it are accepted.
    ending: the acceptance probability of an end-of-sequence token proposed after them, None if none is. Such
        a token is not fed: the output before it decides already.
    expected: expected[m] is the expected number of accepted proposals of m masks, up to the most masks.
    room: slots after the pending tokens.
    """

    pending: int
    probabilities: tuple[float, ...]
    ending: float | None
    expected: tuple[float, ...]
    room: int

    @property
    def max_masks(self) -> int:
        return len(self.expected) - 1

    def all_accepted(self, masks: int) -> float:
        """The probability that all proposals of this many masks are accepted."""
        return self.expected[masks] - self.expected[masks - 1] if masks else 1.0


class Splitter:
    """Chooses the feeds of verifying rows, step by step. All rows share a width: a step is a rectangle."""

    def __init__(self) -> None:
        self._saved = 0.0  # seconds set aside for trials

    def choose(self, cost: Cost, rows: Sequence[Forecast], others: int = 0, floor: int = 0) -> list[Feed]:
        """Feeds for `rows`; `others` more rows take part in a step of at least `floor` slots."""
        num = len(rows) + others
        widest = max(row.pending + min(row.room, len(row.probabilities) + row.max_masks) for row in rows)
        prices = [cost.of(num * max(width, floor)) for width in range(widest + 2)]
        speed = _speed(cost, rows, num, others)
        splits = [_splits(row, widest, cost, speed, num) for row in rows]
        least = max(row.pending for row in rows)
        best, best_value = least, -1e300
        for width in range(least, widest + 1):
            value = reduce(add, (split[width][0] for split in splits)) - speed * prices[width]
            if value > best_value:
                best, best_value = width, value
        self._saved = min(self._saved + TRIALS * prices[best], prices[widest])
        feeds = [split[best][1] for split in splits]
        return self._trial(rows, feeds, cost, num, floor)

    def _trial(
        self, rows: Sequence[Forecast], feeds: list[Feed], cost: Cost, num: int, floor: int
    ) -> list[Feed]:
        """About twice the masks if the time set aside pays for them: without trials, masks that are not fed
        would show nothing.
        """
        wide_feeds = [_wider(row, feed) for row, feed in zip(rows, feeds, strict=True)]
        width = max(floor, *(feed.slots for feed in feeds))
        trial_width = max(floor, *(feed.slots for feed in wide_feeds))
        loss = cost.of(num * trial_width) - cost.of(num * width)
        if wide_feeds == feeds or loss > self._saved:
            return feeds
        self._saved -= loss
        return wide_feeds


def _speed(cost: Cost, rows: Sequence[Forecast], num: int, others: int) -> float:
    """The best tokens per second with a constant number of masks: a step feeds its masks and the proposals of
    the last step; if one of these is wrong, the next step has no proposals.

    So a step without proposals, with 1 token, follows a wrong proposal (probability `failing`). A step with
    proposals has 1 + expected[m] tokens; the mean over both kinds is divided by the cost of the wider one.
    """
    best = 0.0
    all_expected = [row.expected for row in rows]
    for masks in range(max(map(len, all_expected))):
        tokens, max_accepted = 0.0 + others, 0.0
        for expected in all_expected:
            m = masks if masks < len(expected) else len(expected) - 1
            failing = 1.0 - (expected[m] - expected[m - 1] if m else 1.0)  # 1 - all_accepted
            tokens += (1.0 + expected[m] + failing) / (1.0 + failing)
            if expected[m] > max_accepted:
                max_accepted = expected[m]
        speed = tokens / cost.of(num * (1.0 + masks + max_accepted))
        if speed > best:
            best = speed
    return best


def _splits(row: Forecast, widest: int, cost: Cost, speed: float, num: int) -> list[tuple[float, Feed]]:
    """For each width of the step up to `widest`, the best value of this row and its feed.

    The value of p proposals and m masks, with `ending` the probability that the sequence ends after all
    proposals:

        tokens[p] + all_accepted[p] * ((1 - ending) * mask_values[m] + left_out[p])

    tokens: expected tokens of this step. all_accepted: the probability that all p proposals are.
    """
    mask_values = _mask_values(row, cost, speed, num)
    left_out = _left_out_values(row, cost, speed, num)
    all_accepted = list(accumulate(row.probabilities, mul, initial=1.0))
    tokens = list(accumulate(all_accepted[1:], initial=1.0))
    # By the slots that are left for masks: the best number of masks, and its value.
    masks = [0]
    for m in range(1, len(mask_values)):
        masks.append(m if mask_values[m] > mask_values[masks[-1]] else masks[-1])
    masks += masks[-1:] * widest
    goes_on = 1.0 - (row.ending or 0.0)
    values = [goes_on * mask_values[m] for m in masks]

    def best(space: int) -> tuple[float, Feed]:
        """The best use of `space` slots after pending tokens; of equal ones, that with fewer proposals."""
        top, proposals = -1e300, 0
        for p in range(min(space, len(row.probabilities)) + 1):
            value = tokens[p] + all_accepted[p] * (values[space - p] + left_out[p])
            if value > top:
                top, proposals = value, p
        return top, Feed(row.pending, proposals, masks[space - proposals])

    options = [(tokens[0], Feed(row.pending))]
    options += [best(space) for space in range(1, min(row.room, widest - row.pending) + 1)]
    return [options[min(max(0, width - row.pending), len(options) - 1)] for width in range(widest + 1)]


def _mask_values(row: Forecast, cost: Cost, speed: float, num: int) -> list[float]:
    """The value of 0, 1, ... masks in the next step: the proposals that will be accepted, less the time to
    feed them. If one is wrong, the step after that has no proposals and loses as much.
    """
    one = cost.of(num)
    return [0.0] + [
        (row.expected[m] - speed * (cost.of(num * (1.0 + m)) - one) / num) / (2.0 - row.all_accepted(m))
        for m in range(1, len(row.expected))
    ]


def _left_out_values(row: Forecast, cost: Cost, speed: float, num: int) -> list[float]:
    """By the number of proposals that are fed: the value of the others in the next step, if the sequence
    ends after them, times the probability that it does.
    """
    if not row.ending:
        return [0.0] * (len(row.probabilities) + 1)
    values, accepted = [0.0], 0.0  # accepted: expected number of those left out
    for number, probability in enumerate(reversed(row.probabilities), 1):
        accepted = probability * (1.0 + accepted)
        values.append(row.ending * (accepted - speed * cost.of(num * (1.0 + number)) / num))
    return values[::-1]


def _wider(row: Forecast, feed: Feed) -> Feed:
    if row.ending is not None:
        return feed
    masks = min(2 * feed.masks + 1, row.max_masks, row.room - feed.proposals)
    return Feed(feed.pending, feed.proposals, max(masks, feed.masks))
