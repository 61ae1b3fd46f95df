"""How often a row's predictions pass tau, and how many tokens a step may therefore expect. Knows no costs and
no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add

KEEP = 0.98  # what an older observation counts after a newer one of the same prediction
FIRST = 0.5  # believed of masks before anything was seen, as one observation
BELIEF = 1.0  # observations of one mask that the mean over all masks counts for
# a position that was predicted in the step before and did not pass is believed this much as likely to pass
MISSED = 0.7


class PassRates:
    """For the prediction of the next token, k = 0, and that of the k-th mask, k = 1, 2, ...: how often it
    passed tau.

    Predictions behind the first that did not pass count too. They were made from worse context than the next
    step will have, but a step shows all of them at once: one full window tells text that the model cannot
    predict from text that it can. Old observations fade with new ones of the same prediction, not with time:
    what is not tried is not forgotten.
    """

    def __init__(self) -> None:
        self._tried = [0.0]
        self._passed = [0.0]
        self._behind: Sequence[bool] = ()  # of the last step, from the next step's first mask on

    def saw(self, accepted: int, passed: Sequence[bool]) -> None:
        """A step accepted `accepted` tokens, and nothing but tau ended its run; `passed[k]`: whether
        prediction k passed.
        """
        missing = len(passed) - len(self._tried)
        self._tried += [0.0] * missing
        self._passed += [0.0] * missing
        for k, good in enumerate(passed):
            self._tried[k] = self._tried[k] * KEEP + 1.0
            self._passed[k] = self._passed[k] * KEEP + (1.0 if good else 0.0)
        self._behind = passed[accepted + 1 :]

    def expected(self, masks: int) -> list[float]:
        """Tokens that a step with 0, 1, ... `masks` masks is expected to accept; each at least 1, none below
        the one before.
        """
        # In this order, and not with sum(), which some versions of Python round otherwise: C++ must find the
        # same.
        level = (reduce(add, self._passed[1:], 0.0) + FIRST) / (reduce(add, self._tried[1:], 0.0) + 1.0)
        tokens, chance = [1.0], 1.0
        for k in range(1, masks + 1):
            tried, passed = (self._tried[k], self._passed[k]) if k < len(self._tried) else (0.0, 0.0)
            share = (passed + BELIEF * level) / (tried + BELIEF)
            chance *= share if k > len(self._behind) or self._behind[k - 1] else share * MISSED
            tokens.append(tokens[-1] + chance)
        return tokens

    @property
    def certainty(self) -> float:
        """How often the prediction of the next token passed: a mask sees less and hardly does better."""
        return (self._passed[0] + 1.0) / (self._tried[0] + 1.0)
