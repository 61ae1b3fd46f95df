"""What a request cost. Values that are returned, never printed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Stats:
    """Counts and times of one row.

    forwards: steps this row took part in, from the last prefill chunk on, block-commit forwards included; the prefill
    chunks before that are prefill_forwards. accepted[k]: steps that accepted k tokens. Times in seconds, measured from the
    start of the call; decode_time is the row's time after its first token.
    """

    prompt_tokens: int = 0
    tokens: int = 0
    forwards: int = 0
    prefill_forwards: int = 0
    prefill_time: float = 0.0
    decode_time: float = 0.0
    time_to_first_token: float = 0.0
    tokens_after_first: int = 0
    accepted: dict[int, int] = field(default_factory=dict)

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.forwards if self.forwards else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first step, over the time after it."""
        return self.tokens_after_first / self.decode_time if self.decode_time > 0 else 0.0

    def count(self, num_accepted: int) -> None:
        """Note one step that accepted `num_accepted` tokens."""
        self.accepted[num_accepted] = self.accepted.get(num_accepted, 0) + 1
        if self.tokens:
            self.tokens_after_first += num_accepted
        self.tokens += num_accepted

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values["accepted"] = {str(k): v for k, v in sorted(self.accepted.items())}
        return values | {
            "tokens_per_forward": self.tokens_per_forward,
            "tokens_per_second": self.tokens_per_second,
        }
