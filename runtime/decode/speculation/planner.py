"""The plan of the next step that gives the most tokens per second, by estimates and step costs."""

from __future__ import annotations

from collections import abc
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from ..backend import StepPlan
from .cost import Cost, LearnedCost
from .exact_planner import ExactPlanner, TrialBudget

if TYPE_CHECKING:
    from ..sequence import Sequence


class StepPlanner:
    """Chooses the plans of one batch, step by step.

    Sequences with a fixed number of masks feed the widest. Those with masks "auto" are left to an
    `ExactPlanner` in exact mode, and to a `TauPlanner` with a tau.

    `learned_cost`: the cost of a step, which learns from those that run.
    """

    def __init__(self, learned_cost: LearnedCost) -> None:
        self.learned_cost = learned_cost
        self._exact_planner, self._tau_planner = ExactPlanner(), TauPlanner()

    def plans(self, seqs: abc.Sequence[Sequence], rooms: abc.Sequence[int], block: int) -> list[StepPlan]:
        """The plan of each sequence, with at most `rooms` slots after its pending tokens."""
        exact = [i for i, seq in enumerate(seqs) if seq.config.exact and seq.config.masks == "auto"]
        plans = [
            StepPlan(seq.num_pending) if i in exact else seq.widest_plan(rooms[i], block)
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
            forecasts = [seqs[i].forecast(block, rooms[i]) for i in exact]
            choices = self._exact_planner.choose(self.learned_cost.cost, forecasts, len(others), floor)
            for i, plan in zip(exact, choices, strict=True):
                usable = min(plan.masks, seqs[i].usable_masks(plan.draft_tokens))
                plans[i] = StepPlan(plan.pending, plan.draft_tokens, usable)
        return plans


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
        speeds = [_speed(cost, expected, masks) for masks in choices]
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


def _speed(cost: Cost, expected: abc.Sequence[abc.Sequence[float]], masks: abc.Sequence[int]) -> float:
    """Tokens per second with `masks`: each sequence feeds its expected tokens and its masks."""
    tokens = [e[m] for e, m in zip(expected, masks, strict=True)]
    slots = max(t + m for t, m in zip(tokens, masks, strict=True))
    return reduce(add, tokens) / cost.of(len(tokens) * slots)
