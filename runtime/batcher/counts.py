"""What a batcher has done so far, for whoever watches it. Values that are returned, never printed."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests since a batcher was made.

    accepted: given a place; each of them ends as one of finished, failed (with an error), cancelled, expired
    (its deadline came). Not accepted: refused, for what is wrong with the request or because the batcher is
    closed, and overloaded, for want of room. prompt_tokens and tokens: of accepted ones that have ended.
    """

    accepted: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    refused: int = 0
    overloaded: int = 0
    prompt_tokens: int = 0
    tokens: int = 0

    @property
    def ended(self) -> int:
        return self.finished + self.failed + self.cancelled + self.expired

    def to_dict(self) -> dict[str, int]:
        return asdict(self)
