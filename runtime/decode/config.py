"""What a request may ask for. Values are checked where they are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from ..accept import METRICS, is_one_token
from ..errors import SessionError
from ..rules import Rule, broken, integer, is_integer, number, one_of
from .structure import Json, canonical, structure_problems

Window = Literal["auto", "full"] | int
DEFAULT_TAU = 0.95  # of the paper's tables, where tau is wanted and not given
WINDOW = Rule(
    '"auto", "full" or an integer of 1 or more',
    lambda value: value in ("auto", "full") or is_integer(value, 1),
)
TOKEN_IDS = Rule(
    "None or a list of token ids", lambda ids: isinstance(ids, tuple) and all(is_integer(i, 0) for i in ids)
)
STRINGS = Rule(
    "a list of non-empty strings",
    lambda stop: isinstance(stop, tuple) and all(isinstance(s, str) and s for s in stop),
)
SEED = Rule("an integer of 0 to 2**64 - 1", lambda value: is_integer(value, 0) and value < 2**64)


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
    behind a key, with no other white space; None for `", "` and `": "`.

    Raises SessionError that lists every value out of range.
    """

    tau: Annotated[float | None, number("a number of 0 or more")] = None
    metric: Annotated[str, one_of(METRICS)] = "probability"
    max_new_tokens: Annotated[int, integer(1)] = 256
    window: Annotated[Window, WINDOW] = "auto"
    eos_ids: Annotated[Sequence[int] | None, TOKEN_IDS] = None
    stop: Annotated[Sequence[str], STRINGS] = ()
    temperature: Annotated[float, number("a number of 0 or more")] = 0.0
    top_k: Annotated[int, integer(0)] = 0
    top_p: Annotated[float, number("a number above 0, at most 1", high=1, above=True)] = 1.0
    seed: Annotated[int, SEED] = 0
    repetition_penalty: Annotated[float, number("a number above 0", above=True)] = 1.0
    exact: Annotated[bool | None, Rule("True or False", lambda value: isinstance(value, bool))] = None
    lookup: Annotated[int, integer(0)] = 0
    min_p: Annotated[float, number("a number of 0 to 1", high=1)] = 0.0
    cache_salt: Annotated[str, Rule("a text", lambda value: isinstance(value, str))] = ""
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
            object.__setattr__(self, name, canonical(name, getattr(self, name)))
        wrong = list(broken(self).items())
        wrong += structure_problems(
            self.schema, self.regex, self.choice, self.tools, self.separators, self.grammar
        )
        if self.exact is True and self.tau is not None:
            wrong.append(
                (
                    "tau",
                    f"exact and tau exclude each other: exact gives the one-token text whatever is"
                    f" proposed, tau {self.tau!r} accepts what is likely; give one of them",
                )
            )
        if wrong:
            raise SessionError("; ".join(problem for _, problem in wrong), field=wrong[0][0])

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
        return self.structure is not None

    @property
    def structure(self) -> str | None:
        """The field that says what the answer must look like."""
        names = ("schema", "regex", "choice", "tools", "grammar")
        return next((name for name in names if getattr(self, name) is not None), None)

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


def repeatable(config: GenerationConfig, *, has_window: bool, has_seed: bool = False) -> GenerationConfig:
    """`config` with full windows where a text that is drawn, or asked for with a seed, would else depend on
    measured costs: at a tau, unless the user chose a window. Exact mode does not depend on windows.
    """
    at_tau = not config.exact and not config.one_token
    if at_tau and not has_window and (has_seed or not config.is_greedy):
        return config.with_values(window="full", tau=config.tau)
    return config
