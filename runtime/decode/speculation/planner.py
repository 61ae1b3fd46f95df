"""Plans the next step for the most tokens per second, by estimates and step costs.

In exact mode a step is split into draft tokens and masks. The choice maximizes the expected tokens of this
step plus the value of its masks' draft tokens in the next step, less the time of the slots at the speed that
the sequences have reached (the relative value of an average-reward decision process; docs/decoding.md, "How
much to feed"; its T is `tokens`, H `all_accepted`, W `expected`, V `mask_values`, R `speed`).
"""

from __future__ import annotations

from collections import abc
from functools import lru_cache, reduce
from itertools import accumulate
from operator import add, mul
from typing import TYPE_CHECKING

from ..backend import StepPlan
from .cost import Cost, LearnedCost
from .drafts import StepForecast

if TYPE_CHECKING:
    from ..sequence import Sequence

TRIALS = 0.01  # share of the time for more masks than seem to pay
PROMPT_MASKS = 3  # of a prompt at least: their confidences show whether the text is predictable


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
                usable = min(plan.masks, seqs[i].usable_masks(plan.draft_tokens)) if plan.masks else 0
                plans[i] = plan if usable == plan.masks else StepPlan(plan.pending, plan.draft_tokens, usable)
        return plans

    def prompt_plan(self, seq: Sequence, room: int, num: int) -> StepPlan:
        """The plan of the last chunk of a prompt; `num` sequences take part in the steps that follow.

        In exact mode it has as many masks as pay: the tokens that are expected of them, less the time of the
        masks and of their draft tokens beside those of other sequences, at the speed of one token a step.
        """
        plan = seq.widest_plan(room)
        if not seq.config.exact or seq.config.masks != "auto":
            return plan
        cost, expected = self.learned_cost.cost, seq.expected_of_prompt(plan.masks)
        chunk, one = cost.of(plan.pending), cost.of(num)

        def value(m: int) -> float:
            seconds = cost.of(plan.pending + m) - chunk + (cost.of(num * (1 + m)) - one) / num
            return expected[m] - num / one * seconds

        masks = max(range(min(PROMPT_MASKS, plan.masks), plan.masks + 1), key=value)
        return StepPlan(plan.pending, plan.draft_tokens, masks)


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
        speed = _exact_speed(cost, forecasts, num, others)
        extra = [
            speed * (cost.of(num * (1.0 + 2.0 * m)) - cost.of(num * (1.0 + m))) / num
            for m in range(1 + max(forecast.max_masks for forecast in forecasts))
        ]
        splits = [_splits(forecast, extra) for forecast in forecasts]
        least = max(forecast.pending for forecast in forecasts)
        most = max(f.pending + len(split) - 1 for f, split in zip(forecasts, splits, strict=True))
        best, best_value = least, -1e300
        for width in range(least, max(least, most) + 1):
            values = (_at(split, width - f.pending)[0] for f, split in zip(forecasts, splits, strict=True))
            value = reduce(add, values) - speed * cost.of(num * max(width, floor))
            if value > best_value:
                best, best_value = width, value
        self._trial_budget.add(cost.of(num * max(best, floor)), cost.of(num * max(widest, floor)))
        plans = [
            StepPlan(f.pending, *_at(split, best - f.pending)[1:])
            for f, split in zip(forecasts, splits, strict=True)
        ]
        wide_plans = [_wider(forecast, plan) for forecast, plan in zip(forecasts, plans, strict=True)]
        width, trial_width = (max(floor, *(plan.slots for plan in p)) for p in (plans, wide_plans))
        loss = cost.of(num * trial_width) - cost.of(num * width)
        return wide_plans if wide_plans != plans and self._trial_budget.pays(loss) else plans


def _exact_speed(cost: Cost, forecasts: abc.Sequence[StepForecast], num: int, others: int) -> float:
    """The best tokens per second with a constant number of masks m: a step feeds its masks and the m draft
    tokens of the last step; if one of these is wrong, the next step has no draft tokens.
    """
    best = 0.0
    steady = [_steady(forecast.expected) for forecast in forecasts]
    for masks in range(max(map(len, steady))):
        tokens, narrow = 0.0 + others, 1.0
        for row in steady:
            of_step, share = row[masks] if masks < len(row) else row[-1]
            tokens += of_step
            narrow *= share
        seconds = (1.0 - narrow) * cost.of(num * (1.0 + 2.0 * masks)) + narrow * cost.of(num * (1.0 + masks))
        speed = tokens / seconds
        if speed > best:
            best = speed
    return best


@lru_cache(256)  # a row's expectations change only when its masks are fed
def _steady(expected: tuple[float, ...]) -> list[tuple[float, float]]:
    """With 0, 1, ... masks in every step: the mean tokens of a step, and how often it has no draft tokens.

    Such a step, with 1 token, follows a wrong draft token (probability `failing`). A step with draft tokens
    has 1 + expected[m] tokens. A step is narrow if all sequences are without draft tokens.
    """
    found = []
    for m, tokens in enumerate(expected):
        failing = 1.0 - (tokens - expected[m - 1] if m else 1.0)  # 1 - all_accepted
        found.append(((1.0 + tokens + failing) / (1.0 + failing), failing / (1.0 + failing)))
    return found


def _splits(forecast: StepForecast, extra: abc.Sequence[float]) -> list[tuple[float, int, int]]:
    """For each number of slots after the pending tokens, up to the last of use, the best value of this
    sequence, its draft tokens and its masks.

    The value of p draft tokens and m masks, with `ending` the probability that the sequence ends after all
    draft tokens:

        tokens[p] + all_accepted[p] * (1 - ending) * mask_values[m]

    tokens: expected tokens of this step. all_accepted: the probability that all p draft tokens are. Of equal
    splits it is that with fewer draft tokens. mask_values: of the masks in the next step, the draft tokens
    that will be accepted, less the time to feed them beside as many masks (`extra`, in tokens). If one is
    wrong, the step after that has no draft tokens and loses as much.
    """
    masks, values = [0], [0.0]  # by the slots that are left: the best number of masks, and its value
    for m, expected in enumerate(forecast.expected[1:], 1):
        gain = expected - extra[m]
        value = gain / (2.0 - forecast.all_accepted(m)) if gain > 0.0 else 0.0
        masks.append(m if value > values[-1] else masks[-1])
        values.append(max(value, values[-1]))
    num, most = len(forecast.probabilities), masks[-1]
    masks += [most] * num
    goes_on = 1.0 - (forecast.ending or 0.0)
    later = [goes_on * value for value in values + values[-1:] * num]
    all_accepted = list(accumulate(forecast.probabilities, mul, initial=1.0))
    tokens = list(accumulate(all_accepted[1:], initial=1.0))
    options = []
    for space in range(min(max(0, forecast.room), num + most) + 1):
        found = [t + a * v for t, a, v in zip(tokens, all_accepted, later[space::-1], strict=False)]
        draft_tokens = found.index(value := max(found))
        options.append((value, draft_tokens, masks[space - draft_tokens]))
    return options


def _at(split: abc.Sequence[tuple[float, int, int]], space: int) -> tuple[float, int, int]:
    """The option for `space` slots after the pending tokens."""
    return split[min(max(0, space), len(split) - 1)]


def _wider(forecast: StepForecast, plan: StepPlan) -> StepPlan:
    if forecast.ending is not None:
        return plan
    masks = min(2 * plan.masks + 1, forecast.max_masks, forecast.room - plan.draft_tokens)
    return StepPlan(plan.pending, plan.draft_tokens, max(masks, plan.masks))
