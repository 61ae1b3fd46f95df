"""Draft slots, which take the place of masks if a bundle has draft adapters over a stock model."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import SessionError
from ..config import GenerationConfig
from ..sample import splitmix64


@dataclass(frozen=True, slots=True)
class DraftSlots:
    """The inputs of the draft slots of one adapter. `first` is the input of token 0 there; token ids are from
    `low` up to, but not including, `high`.
    """

    first: int
    low: int
    high: int

    @classmethod
    def of(cls, adapter: int, vocab_size: int, low: int, high: int) -> DraftSlots:
        """Of the adapter with this number, from 0."""
        return cls(vocab_size * (1 + adapter), low, high)

    def ids(self, position: int, count: int) -> list[int]:
        """The inputs of `count` slots, the first at `position` of the sequence. They depend on
        nothing else, so that a text can be repeated.
        """
        first, width = self.first + self.low, self.high - self.low
        return [first + splitmix64(0, p) % width for p in range(position, position + count)]


def check_tau(config: GenerationConfig) -> None:
    """Raise SessionError for a config that accepts drafts without verification."""
    if not config.exact and not config.one_token:
        raise SessionError(
            "this bundle is a stock model with a draft adapter: its drafts were trained to be verified, so"
            " that the text is the stock model's. Leave out tau (and exact=False); tau 1 is one token a step",
            code="unsupported_by_model",
            field="tau",
        )
