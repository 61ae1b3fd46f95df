"""One answer with the time of each of its events, and what a reader of it waited for. Judges and compares nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from ..tasks.scores import Output

DIGITS = 6  # of kept seconds


@dataclass(frozen=True, slots=True)
class Timeline:
    """An answer and when it came, in seconds.

    `ttft` is the time from the request to the first event with tokens, None if there was none. `gaps` are the times between two
    events with tokens; an event brings all tokens that one step accepted.
    """

    text: str
    token_ids: tuple[int, ...]
    forwards: int
    finish_reason: str
    ttft: float | None
    gaps: tuple[float, ...]

    @classmethod
    def of(
        cls,
        text: str,
        token_ids: Sequence[int],
        forwards: int,
        finish_reason: str,
        asked: float,
        came: Sequence[float],
    ) -> Timeline:
        """From clock times: when the answer was `asked` for and when its events with tokens `came`."""
        first = round(came[0] - asked, DIGITS) if came else None
        gaps = tuple(round(after - before, DIGITS) for before, after in pairwise(came))
        return cls(text, tuple(token_ids), forwards, finish_reason, first, gaps)

    @property
    def output(self) -> Output:
        return Output(self.text, self.token_ids)

    @property
    def tpot(self) -> float | None:
        """Time per output token: from the first to the last event, divided over all tokens but one. None for a single token."""
        return sum(self.gaps) / (len(self.token_ids) - 1) if len(self.token_ids) > 1 else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Timeline:
        return cls(**values | {"token_ids": tuple(values["token_ids"]), "gaps": tuple(values["gaps"])})
