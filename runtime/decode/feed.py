"""What a row feeds into one step. Knows no tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Feed:
    """From a row's cursor on: `known` tokens, then `proposals` of it, then `masks` masks.

    Outputs are asked of the last known token, of every proposal and of every mask, in this order.
    """

    known: int
    proposals: int = 0
    masks: int = 0

    @property
    def slots(self) -> int:
        return self.known + self.proposals + self.masks

    @property
    def outputs(self) -> int:
        return min(self.known, 1) + self.proposals + self.masks
