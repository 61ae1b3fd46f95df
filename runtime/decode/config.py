"""What a request may ask for. Values are checked where they are built."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from ..accept import METRICS, is_one_token
from ..errors import SessionError

FULL_WINDOW = 2**31 - 1  # larger than any block, and so always the block


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Settings of one request.

    tau: confidence bound, the speed/quality knob; tau >= 1 (entropy: tau <= 0) is one-token mode. metric: probability,
    margin (top-2) or entropy (nats). window: most predictions made in one step; None chooses
    their number step by step, at most the bundle's block, for speed (docs/decoding.md). eos_ids:
    None for the model's own. stop: strings that end the text and are not part of it. temperature 0 is greedy; above it a
    candidate is drawn and its own probability is what tau is compared with. top_k 0 and top_p 1 are off. seed: draws depend
    on it and on the position only. repetition_penalty 1 is off.

    Raises SessionError that lists every value out of range.
    """

    tau: float = 0.95
    metric: str = "probability"
    max_new_tokens: int = 256
    window: int | None = None
    eos_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        checks = {
            "metric": (self.metric in METRICS, f"one of {', '.join(METRICS)}"),
            "tau": (_finite(self.tau) and self.tau >= 0, "a number of 0 or more"),
            "max_new_tokens": (
                _integer(self.max_new_tokens) and self.max_new_tokens >= 1,
                "an integer of 1 or more",
            ),
            "window": (
                self.window is None or (_integer(self.window) and self.window >= 1),
                "None or an integer of 1 or more",
            ),
            "eos_ids": (
                self.eos_ids is None or all(_integer(i) and i >= 0 for i in self.eos_ids),
                "None or a tuple of token ids",
            ),
            "stop": (
                isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop),
                "a tuple of non-empty strings",
            ),
            "temperature": (_finite(self.temperature) and self.temperature >= 0, "a number of 0 or more"),
            "top_k": (_integer(self.top_k) and self.top_k >= 0, "an integer of 0 or more"),
            "top_p": (_finite(self.top_p) and 0 < self.top_p <= 1, "a number above 0, at most 1"),
            "seed": (_integer(self.seed) and 0 <= self.seed < 2**64, "an integer of 0 to 2**64 - 1"),
            "repetition_penalty": (
                _finite(self.repetition_penalty) and self.repetition_penalty > 0,
                "a number above 0",
            ),
        }
        wrong = [
            f"{name} must be {what}, not {getattr(self, name)!r}"
            for name, (good, what) in checks.items()
            if not good
        ]
        if wrong:
            raise SessionError("; ".join(wrong))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def needs_logits(self) -> bool:
        """Whether tokens are chosen from logits on the host, rather than by the graph's own argmax."""
        return not self.is_greedy or self.repetition_penalty != 1

    @property
    def one_token(self) -> bool:
        return is_one_token(self.tau, self.metric)

    def with_values(self, **changes: Any) -> GenerationConfig:
        """A checked copy with some fields changed."""
        known = {f.name for f in fields(self)}
        if unknown := sorted(set(changes) - known):
            raise SessionError(f"unknown settings: {', '.join(unknown)} (known: {', '.join(sorted(known))})")
        return replace(self, **changes)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
