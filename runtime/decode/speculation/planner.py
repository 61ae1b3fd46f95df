"""Plans the next step for the most tokens per second, by estimates and step costs.

In exact mode a step is split into draft tokens and masks. The choice maximizes the expected tokens of this
step plus the value of its masks' draft tokens in the next step, less the time of the slots at the speed that
the sequences have reached (the relative value of an average-reward decision process; docs/decoding.md, "How
much to feed"; its T is `tokens`, H `all_accepted`, W `expected`, V `mask_values`, R `speed`).
"""

from __future__ import annotations

from collections import abc
from functools import reduce
from itertools import accumulate
from operator import add, mul
from typing import TYPE_CHECKING

from ..backend import StepPlan
from .cost import Cost, LearnedCost
from .drafts import StepForecast

if TYPE_CHECKING:
    from ..sequence import Sequence

TRIALS = 0.01  # share of the time for more masks than seem to pay


class StepPlanner:
    """Chooses the plans of one batch, step by step.

    Sequences with a fixed number of masks feed the widest. Those with masks "auto" are left to an
    `ExactPlanner` in exact mode, and to a `TauPlanner` with a tau.

    `learned_cost`: the cost of a step, which learns from those that run.
    """

    def __init__(self, learned_cost: LearnedCost) -> None:
        self.learned_cost = learned_cost
        self._exact_planner, self._tau_planner = ExactPlanner(), TauPlanner()

    def plans(self, seqs: abc.Sequence[Sequence], rooms: abc.Sequence[int]) -> list[StepPlan]:
        """The plan of each sequence, with at most `rooms` slots after its pending tokens."""
        exact = [i for i, seq in enumerate(seqs) if seq.config.exact and seq.config.masks == "auto"]
        plans = [
            StepPlan(seq.num_pending) if i in exact else seq.widest_plan(rooms[i])
            for i, seq in enumerate(seqs)
        ]
        if not exact and not any(plan.masks for plan in plans):
            return plans  # nothing to choose, and time between two forwards is short
        with_tau = [i for i, seq in enumerate(seqs) if not seq.config.exact]
        if any(plans[i].masks and seqs[i].config.masks == "auto" for i in with_tau):
            most = [plans[i].masks for i in with_tau]
            masks = self._tau_planner.choose(self.learned_cost.cost, [seqs[i] for i in with_tau], most)
            for i, m in zip(with_tau, masks, strict=True):
                plans[i] = StepPlan(plans[i].pending, plans[i].draft_tokens, m)
        if exact:
            others = [plan for i, plan in enumerate(plans) if i not in exact]
            floor = max((plan.slots for plan in others), default=0)
            forecasts = [seqs[i].forecast(rooms[i]) for i in exact]
            choices = self._exact_planner.choose(self.learned_cost.cost, forecasts, len(others), floor)
            for i, plan in zip(exact, choices, strict=True):
                usable = min(plan.masks, seqs[i].usable_masks(plan.draft_tokens))
                plans[i] = StepPlan(plan.pending, plan.draft_tokens, usable)
        return plans


class TrialBudget:
    """The time for trials: steps with about twice the masks that seem to pay. Without trials, masks that are
    not fed would show nothing.
    """

    def __init__(self) -> None:
        self._seconds = 0.0

    def add(self, seconds: float, most: float) -> None:
        """Set aside a share of a step's `seconds`, up to `most` in all."""
        self._seconds = min(self._seconds + TRIALS * seconds, most)

    def pays(self, loss: float) -> bool:
        """Whether there is enough for a trial that loses `loss` seconds; if so, they are spent."""
        if loss > self._seconds:
            return False
        self._seconds -= loss
        return True


class TauPlanner:
    """Chooses the masks of sequences with a tau: the same number for all, because a step is a rectangle, rows
    x the slots of the widest.

    It is the number with the most expected tokens per second, counting that accepted tokens are fed again.
    Now and then a step tries more masks, less often if the next tokens themselves are less certain: otherwise
    a sequence without masks would never learn that its text has become predictable.
    """

    def __init__(self) -> None:
        self._trial_budget = TrialBudget()

    def choose(self, cost: Cost, seqs: abc.Sequence[Sequence], most: abc.Sequence[int]) -> list[int]:
        """Masks of each sequence, from 0 to its `most`; exactly that for a sequence with a fixed number."""
        is_free = [seq.config.masks == "auto" for seq in seqs]
        widest = max((m for m, free in zip(most, is_free, strict=True) if free), default=0)
        expected = [seq.pass_rates.expected(m) for seq, m in zip(seqs, most, strict=True)]
        choices = [
            [min(number, m) if free else m for m, free in zip(most, is_free, strict=True)]
            for number in range(widest + 1)
        ]
        speeds = [_tau_speed(cost, expected, masks) for masks in choices]
        best = max(range(widest + 1), key=lambda number: (speeds[number], number))
        best_seconds, most_seconds = [
            cost.of(len(seqs) * max(seq.num_pending + m for seq, m in zip(seqs, masks, strict=True)))
            for masks in (choices[best], choices[widest])
        ]
        certainty = reduce(add, (seq.pass_rates.certainty for seq in seqs)) / len(seqs)
        self._trial_budget.add(certainty * best_seconds, most_seconds)
        trial = min(2 * best + 1, widest)
        tokens = reduce(add, (e[m] for e, m in zip(expected, choices[trial], strict=True)))
        loss = tokens * (1.0 / speeds[trial] - 1.0 / speeds[best])
        return choices[trial if trial > best and self._trial_budget.pays(loss) else best]


def _tau_speed(cost: Cost, expected: abc.Sequence[abc.Sequence[float]], masks: abc.Sequence[int]) -> float:
    """Tokens per second with `masks`: each sequence feeds its expected tokens and its masks."""
    tokens = [e[m] for e, m in zip(expected, masks, strict=True)]
    slots = max(t + m for t, m in zip(tokens, masks, strict=True))
    return reduce(add, tokens) / cost.of(len(tokens) * slots)


class ExactPlanner:
    """Chooses the plans of verifying sequences, step by step. All sequences share a width: a step is a
    rectangle.
    """

    def __init__(self) -> None:
        self._trial_budget = TrialBudget()

    def choose(
        self, cost: Cost, forecasts: abc.Sequence[StepForecast], others: int = 0, floor: int = 0
    ) -> list[StepPlan]:
        """Plans for `forecasts`; `others` more sequences take part in a step of at least `floor` slots."""
        num = len(forecasts) + others
        widest = max(
            forecast.pending + min(forecast.room, len(forecast.probabilities) + forecast.max_masks)
            for forecast in forecasts
        )
        prices = [cost.of(num * max(width, floor)) for width in range(widest + 2)]
        speed = _exact_speed(cost, forecasts, num, others)
        splits = [_splits(forecast, widest, cost, speed, num) for forecast in forecasts]
        least = max(forecast.pending for forecast in forecasts)
        best, best_value = least, -1e300
        for width in range(least, widest + 1):
            value = reduce(add, (split[width][0] for split in splits)) - speed * prices[width]
            if value > best_value:
                best, best_value = width, value
        self._trial_budget.add(prices[best], prices[widest])
        plans = [split[best][1] for split in splits]
        wide_plans = [_wider(forecast, plan) for forecast, plan in zip(forecasts, plans, strict=True)]
        width, trial_width = (max(floor, *(plan.slots for plan in p)) for p in (plans, wide_plans))
        loss = cost.of(num * trial_width) - cost.of(num * width)
        return wide_plans if wide_plans != plans and self._trial_budget.pays(loss) else plans


def _exact_speed(cost: Cost, forecasts: abc.Sequence[StepForecast], num: int, others: int) -> float:
    """The best tokens per second with a constant number of masks m: a step feeds its masks and the m draft
    tokens of the last step; if one of these is wrong, the next step has no draft tokens.

    So a step without draft tokens, with 1 token, follows a wrong draft token (probability `failing`). A step
    with draft tokens has 1 + expected[m] tokens. Both kinds count by how often they occur. A step is narrow
    if all sequences are without draft tokens.
    """
    best = 0.0
    all_expected = [forecast.expected for forecast in forecasts]
    for masks in range(max(map(len, all_expected))):
        tokens, narrow = 0.0 + others, 1.0
        for expected in all_expected:
            m = masks if masks < len(expected) else len(expected) - 1
            failing = 1.0 - (expected[m] - expected[m - 1] if m else 1.0)  # 1 - all_accepted
            tokens += (1.0 + expected[m] + failing) / (1.0 + failing)
            narrow *= failing / (1.0 + failing)
        seconds = (1.0 - narrow) * cost.of(num * (1.0 + 2.0 * masks)) + narrow * cost.of(num * (1.0 + masks))
        speed = tokens / seconds
        if speed > best:
            best = speed
    return best


def _splits(
    forecast: StepForecast, widest: int, cost: Cost, speed: float, num: int
) -> list[tuple[float, StepPlan]]:
    """For each width of the step up to `widest`, the best value of this sequence and its plan.

    The value of p draft tokens and m masks, with `ending` the probability that the sequence ends after all
    draft tokens:

        tokens[p] + all_accepted[p] * (1 - ending) * mask_values[m]

    tokens: expected tokens of this step. all_accepted: the probability that all p draft tokens are.
    """
    mask_values = _mask_values(forecast, cost, speed, num)
    all_accepted = list(accumulate(forecast.probabilities, mul, initial=1.0))
    tokens = list(accumulate(all_accepted[1:], initial=1.0))
    # By the slots that are left for masks: the best number of masks, and its value.
    masks = [0]
    for m in range(1, len(mask_values)):
        masks.append(m if mask_values[m] > mask_values[masks[-1]] else masks[-1])
    masks += masks[-1:] * widest
    goes_on = 1.0 - (forecast.ending or 0.0)
    values = [goes_on * mask_values[m] for m in masks]

    def best(space: int) -> tuple[float, StepPlan]:
        """The best use of `space` slots after pending tokens; of equal ones, that with fewer draft tokens."""
        top, draft_tokens = -1e300, 0
        for p in range(min(space, len(forecast.probabilities)) + 1):
            value = tokens[p] + all_accepted[p] * values[space - p]
            if value > top:
                top, draft_tokens = value, p
        return top, StepPlan(forecast.pending, draft_tokens, masks[space - draft_tokens])

    options = [(tokens[0], StepPlan(forecast.pending))]
    options += [best(space) for space in range(1, min(forecast.room, widest - forecast.pending) + 1)]
    return [options[min(max(0, width - forecast.pending), len(options) - 1)] for width in range(widest + 1)]


def _mask_values(forecast: StepForecast, cost: Cost, speed: float, num: int) -> list[float]:
    """The value of 0, 1, ... masks in the next step: the draft tokens that will be accepted, less the time to
    feed them beside as many masks. If one is wrong, the step after that has no draft tokens and loses as
    much.
    """
    return [0.0] + [
        (forecast.expected[m] - speed * (cost.of(num * (1.0 + 2.0 * m)) - cost.of(num * (1.0 + m))) / num)
        / (2.0 - forecast.all_accepted(m))
        for m in range(1, len(forecast.expected))
    ]


def _wider(forecast: StepForecast, plan: StepPlan) -> StepPlan:
    if forecast.ending is not None:
        return plan
    masks = min(2 * plan.masks + 1, forecast.max_masks, forecast.room - plan.draft_tokens)
    return StepPlan(plan.pending, plan.draft_tokens, max(masks, plan.masks))
