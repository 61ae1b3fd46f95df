"""Counts and times of one request."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from time import perf_counter
from typing import Any


@dataclass(slots=True)
class Stats:
    """Counts of one sequence, and times in seconds.

    prompt_tokens: tokens of the prompt.
    cached_tokens: prompt tokens whose KV entries came from the prefix cache.
    tokens: generated tokens.
    forwards: steps from the last prefill chunk on.
    prefill_forwards: the prefill chunks before the last.
    queue_time: from `began` to the first forward.
    prefill_time: from there to the first token.
    decode_time: after the first token.
    time_to_first_token: queue_time + prefill_time.
    tokens_after_first: tokens of all steps but the first that gave one.
    draft_tokens: tokens that were fed to be verified.
    accepted_draft_tokens: proposed tokens that were accepted.
    forced: tokens that a grammar forced; part of `tokens`, not of `accepted`.
    accepted: accepted[k] is the number of steps that gave k tokens.
    steps: the tokens of each step, and the confidence that ended it: with a tau and without a grammar, that
        of the first prediction that did not pass, else None. A riskier tau takes the same first steps, until
        one of these passes.
    began: when the sequence was created, before its prompt was tokenized, or when its request arrived at the
        server; by perf_counter.
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
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    forced: int = 0
    accepted: dict[int, int] = field(default_factory=dict)
    steps: tuple[tuple[int, float | None], ...] = field(default=(), repr=False, compare=False)
    began: float = field(default_factory=perf_counter, repr=False, compare=False)

    @property
    def rejected_draft_tokens(self) -> int:
        """Draft tokens that were wrong, or came after a wrong one."""
        return self.draft_tokens - self.accepted_draft_tokens

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.forwards if self.forwards else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first step, divided by the time after it."""
        return self.tokens_after_first / self.decode_time if self.decode_time > 0 else 0.0

    def starts(self) -> None:
        """Note a forward of the sequence; the first one ends queue_time."""
        if not self.forwards and not self.prefill_forwards:
            self.queue_time = perf_counter() - self.began

    def count(self, num_accepted: int, num_forced: int = 0, refused: float | None = None) -> None:
        """Note a step that gave `num_accepted` tokens of the model and `num_forced` of a grammar; `refused`:
        the confidence that ended it.
        """
        elapsed = perf_counter() - self.began
        if self.accepted:
            self.tokens_after_first += num_accepted + num_forced
            self.decode_time = elapsed - self.time_to_first_token
        else:
            self.time_to_first_token, self.prefill_time = elapsed, elapsed - self.queue_time
        self.accepted[num_accepted] = self.accepted.get(num_accepted, 0) + 1
        self.steps += ((num_accepted + num_forced, refused),)
        self.tokens += num_accepted + num_forced
        self.forced += num_forced

    def copy(self) -> Stats:
        """The counts so far, which later steps do not change."""
        return replace(self, accepted=dict(self.accepted))

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}
        values["accepted"] = {str(k): v for k, v in sorted(self.accepted.items())}
        names = ("rejected_draft_tokens", "tokens_per_forward", "tokens_per_second")
        return values | {name: getattr(self, name) for name in names}
