"""How often a row's masks were accepted, and how many tokens a step may therefore expect. Knows no costs and no tokens."""

from __future__ import annotations

KEEP = 0.97  # what an older observation counts after a newer one of the same mask
FIRST = 0.5  # believed of the first mask before anything was seen
RISE = 0.3  # a mask whose predecessor was accepted is believed to be surer than that one: this much nearer to certain
BELIEF = 0.5  # observations that a belief counts for


class Acceptance:
    """For the k-th mask of a step, k = 1, 2, ...: how often its token was accepted when those before it were.

    Old observations fade with new ones of the same mask, not with time: what is not tried is not forgotten.
    """

    def __init__(self) -> None:
        self._tried: list[float] = []
        self._accepted: list[float] = []

    def saw(self, accepted: int, masks: int) -> None:
        """A step with `masks` masks accepted `accepted` tokens, and nothing but tau ended its run."""
        missing = masks - len(self._tried)
        self._tried += [0.0] * missing
        self._accepted += [0.0] * missing
        for k in range(min(accepted, masks)):
            self._tried[k] = self._tried[k] * KEEP + 1.0
            self._accepted[k] = self._accepted[k] * KEEP + (1.0 if k + 1 < accepted else 0.0)

    def expected(self, masks: int) -> list[float]:
        """Tokens that a step with 0, 1, ... `masks` masks is expected to accept; each at least 1, none below the one before."""
        tokens, chance, belief = [1.0], 1.0, FIRST
        for k in range(masks):
            tried, accepted = (self._tried[k], self._accepted[k]) if k < len(self._tried) else (0.0, 0.0)
            share = (accepted + BELIEF * belief) / (tried + BELIEF)
            chance *= share
            tokens.append(tokens[-1] + chance)
            belief = share + RISE * (1.0 - share)
        return tokens
