"""What a request may ask for. Values are checked where they are built."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from ..accept import METRICS, is_one_token
from ..errors import SessionError
from .structure import Json, canonical, structure_problems

Window = Literal["auto", "full"] | int
DEFAULT_TAU = 0.95  # of the paper's tables, where tau is wanted and not given


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Settings of one request.

    exact (the default): several tokens a step, and the very text of one-token decoding. tau: confidence bound
    instead, the speed/quality knob; tau >= 1 (entropy: tau <= 0) is one-token mode. Giving a tau turns exact
    off, giving both is an error. metric: probability, margin (top-2) or entropy (nats). window: predictions
    of new positions made in one step, `full` for the bundle's block; `auto` chooses their number step by
    step, for speed (docs/decoding.md). lookup: propose, too, what followed the last so many tokens when they
    stood in the prompt or the answer before (exact only); 0 is off. eos_ids: None for the model's own. stop:
    strings that end the text and are not part of it; it, eos_ids and choice take lists, too. temperature 0 is
    greedy; above it a candidate is drawn, and its own probability is what tau is compared with. top_k 0,
    top_p 1 and min_p 0 are off; min_p keeps tokens at least that much as likely as the likeliest. seed: draws
    depend on it and on the position only; at a tau a fixed window makes the text repeatable, too.
    repetition_penalty 1 is off. cache_salt: only requests with the same one share KV entries.

    At most one of these says what the answer must look like (docs/structured.md): schema: a JSON schema, as
    text or as a mapping; regex; choice: one of these strings; tools: functions in OpenAI's form, as text or
    as a list, of which the answer is calls; grammar: the name of one that is kept in the bundle (`mars-export
    grammar`). Schema and tools become JSON text here. separators: between the items of a JSON answer, and
    behind a key, with no other white space; None for the model's own habit.

    Raises SessionError that lists every value out of range.
    """

    tau: float | None = None
    metric: str = "probability"
    max_new_tokens: int = 256
    window: Window = "auto"
    eos_ids: Sequence[int] | None = None
    stop: Sequence[str] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    exact: bool | None = None
    lookup: int = 0
    min_p: float = 0.0
    cache_salt: str = ""
    schema: Json | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    tools: Json | None = None
    separators: tuple[str, str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str | list):
            object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for name in ("eos_ids", "choice"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.exact is None:
            object.__setattr__(self, "exact", self.tau is None)
        if self.exact is False and self.tau is None:
            object.__setattr__(self, "tau", DEFAULT_TAU)
        for name in ("schema", "tools"):
            object.__setattr__(self, name, canonical(getattr(self, name)))
        checks = {
            "metric": (self.metric in METRICS, f"one of {', '.join(METRICS)}"),
            "tau": (self.tau is None or (_finite(self.tau) and self.tau >= 0), "a number of 0 or more"),
            "exact": (isinstance(self.exact, bool), "True or False"),
            "max_new_tokens": (_at_least(self.max_new_tokens, 1), "an integer of 1 or more"),
            "window": (
                self.window in ("auto", "full") or _at_least(self.window, 1),
                '"auto", "full" or an integer of 1 or more',
            ),
            "lookup": (_at_least(self.lookup, 0), "an integer of 0 or more"),
            "cache_salt": (isinstance(self.cache_salt, str), "a text"),
            "eos_ids": (
                self.eos_ids is None
                or (isinstance(self.eos_ids, tuple) and all(_at_least(i, 0) for i in self.eos_ids)),
                "None or a list of token ids",
            ),
            "stop": (
                isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop),
                "a list of non-empty strings",
            ),
            "temperature": (_finite(self.temperature) and self.temperature >= 0, "a number of 0 or more"),
            "top_k": (_at_least(self.top_k, 0), "an integer of 0 or more"),
            "top_p": (_finite(self.top_p) and 0 < self.top_p <= 1, "a number above 0, at most 1"),
            "min_p": (_finite(self.min_p) and 0 <= self.min_p <= 1, "a number of 0 to 1"),
            "seed": (_at_least(self.seed, 0) and self.seed < 2**64, "an integer of 0 to 2**64 - 1"),
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
        wrong += structure_problems(
            self.schema, self.regex, self.choice, self.tools, self.separators, self.grammar
        )
        if self.exact is True and self.tau is not None:
            wrong.append(
                f"exact and tau exclude each other: exact gives the one-token text whatever is"
                f" proposed, tau {self.tau!r} accepts what is likely; give one of them"
            )
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
    def is_structured(self) -> bool:
        """Whether a grammar decides what the answer may look like."""
        return any(
            part is not None for part in (self.schema, self.regex, self.choice, self.tools, self.grammar)
        )

    @property
    def one_token(self) -> bool:
        return self.tau is not None and is_one_token(self.tau, self.metric)

    def with_values(self, **changes: Any) -> GenerationConfig:
        """A checked copy with some fields changed. A tau turns exact off, exact=True takes tau away."""
        known = {f.name for f in fields(self)}
        if unknown := sorted(set(changes) - known):
            raise SessionError(f"unknown settings: {', '.join(unknown)} (known: {', '.join(sorted(known))})")
        if "tau" in changes and "exact" not in changes:
            changes["exact"] = None
        elif changes.get("exact") is True and "tau" not in changes:
            changes["tau"] = None
        return replace(self, **changes)


def _finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # An integer may be too large for a float.
    return (isinstance(value, int) and abs(value) < 2**1000) or (
        isinstance(value, float) and math.isfinite(value)
    )


def _at_least(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low
