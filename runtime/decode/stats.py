"""What a request cost, and its clock. Values that are returned, never printed."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from time import perf_counter
from typing import Any


@dataclass(slots=True)
class Stats:
    """Counts and times of one row.

    forwards: steps this row took part in, from the last prefill chunk on, block-commit forwards included; the
    prefill chunks before that are prefill_forwards. accepted[k]: steps that gave k tokens. proposed: tokens
    that were fed to be verified; verified: those that held. forced: tokens that a grammar gave, among
    `tokens` and never among `accepted`. cached_tokens: prompt tokens whose KV entries were there before.
    Times in seconds from the making of the row, which is before its prompt is tokenized: queue_time until its
    first forward, prefill_time from there to its first token, time_to_first_token both together, decode_time
    after it.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    forwards: int = 0
    prefill_forwards: int = 0
    queue_time: float = 0.0
    prefill_time: float = 0.0
    decode_time: float = 0.0
    time_to_first_token: float = 0.0
    tokens_after_first: int = 0
    proposed: int = 0
    verified: int = 0
    forced: int = 0
    accepted: dict[int, int] = field(default_factory=dict)
    began: float = field(default_factory=perf_counter, repr=False, compare=False)

    @property
    def rejected(self) -> int:
        """Proposals that did not hold, or stood behind one that did not."""
        return self.proposed - self.verified

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.forwards if self.forwards else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first step, over the time after it."""
        return self.tokens_after_first / self.decode_time if self.decode_time > 0 else 0.0

    def starts(self) -> None:
        """The row is about to take part in a forward; only the first counts."""
        if not self.forwards and not self.prefill_forwards:
            self.queue_time = perf_counter() - self.began

    def count(self, num_accepted: int, num_forced: int = 0) -> None:
        """Note one step that gave `num_accepted` tokens of the model and `num_forced` of a grammar."""
        elapsed = perf_counter() - self.began
        if self.accepted:
            self.tokens_after_first += num_accepted + num_forced
            self.decode_time = elapsed - self.time_to_first_token
        else:
            self.time_to_first_token, self.prefill_time = elapsed, elapsed - self.queue_time
        self.accepted[num_accepted] = self.accepted.get(num_accepted, 0) + 1
        self.tokens += num_accepted + num_forced
        self.forced += num_forced

    def copy(self) -> Stats:
        """What is counted up to now, which later steps do not change."""
        return replace(self, accepted=dict(self.accepted))

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "began"}
        values["accepted"] = {str(k): v for k, v in sorted(self.accepted.items())}
        names = ("rejected", "tokens_per_forward", "tokens_per_second")
        return values | {name: getattr(self, name) for name in names}
