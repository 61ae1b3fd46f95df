"""The settings of one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from ..accept import METRICS, is_one_token, passes
from ..answer_format import CHOICE, GRAMMAR, REGEX, SCHEMA, SEPARATORS, TOOLS, Json, canonical, json_problems
from ..errors import SessionError
from ..rules import MASKS, Rule, broken, integer, is_integer, is_number, number, one_of

Masks = Literal["auto", "full"] | int
DEFAULT_TAU = 0.95  # of the paper's tables, for exact=False without a tau
TOKEN_IDS = Rule(
    "None or a list of token ids", lambda ids: isinstance(ids, tuple) and all(is_integer(i, 0) for i in ids)
)
STRINGS = Rule(
    "a list of non-empty strings",
    lambda stop: isinstance(stop, tuple) and all(isinstance(s, str) and s for s in stop),
)
MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS = 100, 20  # as in OpenAI's API
LOGIT_BIAS = Rule(
    f"a mapping of token ids to numbers of -{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}",
    lambda bias: (
        isinstance(bias, tuple)
        and all(is_integer(i, 0) and is_number(value) and abs(value) <= MAX_LOGIT_BIAS for i, value in bias)
    ),
)
TOP = Rule(
    f"an integer of 0 to {MAX_TOP_LOGPROBS}", lambda value: is_integer(value, 0) and value <= MAX_TOP_LOGPROBS
)
# Fields that need logits, with the values that do not.
OFF: Mapping[str, Any] = {
    "temperature": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0,
    "logit_bias": (), "top_logprobs": 0,
}  # fmt: skip
PENALTY = number("a number of -2 to 2", -2, 2)
SEED = integer(0, "an integer of 0 to 2**64 - 1", high=2**64 - 1)


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Settings of one request.

    Decoding:
    exact: Exact mode, the default: the text of one-token decoding, several tokens a step.
    tau: Accept predictions with at least this confidence, without verification. Lower is faster and riskier;
        the paper uses 0.95; 1 (entropy: 0) is one token a step. Not with exact.
    metric: Confidence that tau is compared with: probability, margin (top-1 minus top-2) or entropy (nats).
        The last two need a bundle exported with --metrics.
    masks: Maximum mask slots of a step: auto (the default) tunes it for speed, full is as many as the
        bundle's block allows. In exact mode it never changes the text; with a tau, auto may give other texts
        in other runs.
    prompt_lookup: Prompt lookup: if the last N tokens occurred before, propose the text that followed them.
        Exact mode only; 0 is off.
    stop: End the answer before this text. Repeatable.

    Sampling:
    temperature: 0 is greedy. Above 0 needs a bundle with logits. Also --temp. A tau applies to the drawn
        token's confidence.
    top_k: Sample from the K most likely tokens; 0 is off.
    top_p: Sample from the smallest set of tokens with this probability; 1 is off.
    min_p: Sample from tokens with at least this share of the highest probability; 0 is off.
    seed: Seed; 0 by default. The same settings give the same text: with a tau, all masks are used unless
        masks is given.
    repetition_penalty: Above 1 makes repetition less likely; 1 is off.

    Structured answers:
    schema: The answer is JSON that satisfies this JSON schema.
    regex: The answer matches this regular expression.
    choice: The answer is one of these texts. Repeatable.
    tools: The answer calls these functions: JSON in the form of OpenAI's API.
    grammar: The answer follows this grammar of the bundle (`mars-export grammar`).

    Python only:
    max_new_tokens: Maximum tokens of the answer.
    eos_ids: End-of-sequence tokens; None for the model's. A list is accepted, as for stop and choice.
    cache_salt: Only requests with the same salt share KV entries.
    separators: Between the items of a JSON answer and after a key; None for `", "` and `": "`. There is no
        other white space.
    presence_penalty: Subtracted from the logits of tokens that the answer contains; 0 is off.
    frequency_penalty: The same, for each time that they occur; 0 is off.
    logit_bias: Numbers that are added to the logits of tokens, by their ids.
    top_logprobs: Return this many of the most likely tokens at each position, at most 20.
    masks_of_tau: Whether masks came with the tau, from `repeatable` or a profile; exact mode sets it to auto.

    At most one of schema (a text or a mapping), regex, choice, tools (a text or a list) and grammar may be
    set, except for schema with tools: the answer is calls, or JSON of the schema (docs/structured.md). Raises
    SessionError that lists every invalid value.
    """

    tau: Annotated[float | None, number("a number of 0 or more")] = None
    metric: Annotated[str, one_of(METRICS)] = "probability"
    max_new_tokens: Annotated[int, integer(1)] = 256
    masks: Annotated[Masks, MASKS] = "auto"
    eos_ids: Annotated[Sequence[int] | None, TOKEN_IDS] = None
    stop: Annotated[Sequence[str], STRINGS] = ()
    temperature: Annotated[float, number("a number of 0 or more")] = 0.0
    top_k: Annotated[int, integer(0)] = 0
    top_p: Annotated[float, number("a number above 0, at most 1", high=1, above=True)] = 1.0
    seed: Annotated[int, SEED] = 0
    repetition_penalty: Annotated[float, number("a number above 0", above=True)] = 1.0
    exact: Annotated[bool | None, Rule("True or False", lambda value: isinstance(value, bool))] = None
    prompt_lookup: Annotated[int, integer(0)] = 0
    min_p: Annotated[float, number("a number of 0 to 1", high=1)] = 0.0
    cache_salt: Annotated[str, Rule("a text", lambda value: isinstance(value, str))] = ""
    schema: Annotated[Json | None, SCHEMA] = None
    regex: Annotated[str | None, REGEX] = None
    choice: Annotated[Sequence[str] | None, CHOICE] = None
    tools: Annotated[Json | None, TOOLS] = None
    separators: Annotated[tuple[str, str] | None, SEPARATORS] = None
    grammar: Annotated[str | None, GRAMMAR] = None
    presence_penalty: Annotated[float, PENALTY] = 0.0
    frequency_penalty: Annotated[float, PENALTY] = 0.0
    logit_bias: Annotated[Mapping[int, float] | Sequence[tuple[int, float]], LOGIT_BIAS] = ()
    top_logprobs: Annotated[int, TOP] = 0
    masks_of_tau: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        if isinstance(self.stop, str):
            put("stop", (self.stop,))
        for name in ("stop", "eos_ids", "choice"):
            if isinstance(getattr(self, name), list):
                put(name, tuple(getattr(self, name)))
        if isinstance(self.logit_bias, Mapping):
            put("logit_bias", tuple(self.logit_bias.items()))
        if self.exact is None:
            put("exact", self.tau is None)
        if self.exact is False and self.tau is None:
            put("tau", DEFAULT_TAU)
        given = [name for name in ("schema", "tools") if getattr(self, name) is not None]
        for name in given:
            put(name, canonical(name, getattr(self, name)))
        problems = list(broken(self).items())
        for name in given:
            problems += [(name, problem) for problem in json_problems(name, getattr(self, name))]
        if len(names := self._structures) > 1 and names != ["schema", "tools"]:
            problems.append((names[0], f"{' and '.join(names)} exclude each other: give one of them"))
        if self.exact is True and self.tau is not None:
            problem = (
                f"exact and tau exclude each other: exact verifies every token, tau {self.tau!r} accepts"
                " likely tokens without verification; give one of them"
            )
            problems.append(("tau", problem))
        if problems:
            raise SessionError("; ".join(problem for _, problem in problems), field=problems[0][0])

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def host_chooses(self) -> bool:
        """Whether the host chooses tokens from logits; otherwise the graph's argmax does."""
        return self.logits_field not in (None, "top_logprobs")

    @property
    def needs_logits(self) -> bool:
        return self.logits_field is not None

    @property
    def logits_field(self) -> str | None:
        """The first field that needs the graph's logits; None if none does."""
        return next((name for name, neutral in OFF.items() if getattr(self, name) != neutral), None)

    @property
    def is_structured(self) -> bool:
        """Whether a grammar constrains the answer."""
        return self.structure is not None

    @property
    def structure(self) -> str | None:
        """The field that constrains the answer."""
        return next(iter(self._structures), None)

    @property
    def _structures(self) -> list[str]:
        names = ("schema", "regex", "choice", "tools", "grammar")
        return [name for name in names if getattr(self, name) is not None]

    @property
    def may_think(self) -> bool:
        """Whether a chat's answer may begin with thinking: of grammars, those with calls allow it."""
        return not self.is_structured or self.tools is not None

    @property
    def one_token(self) -> bool:
        return self.tau is not None and is_one_token(self.tau, self.metric)

    def passes(self, confidence: float) -> bool:
        """Whether a confidence reaches tau; never in exact mode, which has none."""
        return self.tau is not None and passes(confidence, self.tau, self.metric)

    def with_values(self, **changes: Any) -> GenerationConfig:
        """A checked copy with some fields changed. A tau turns exact mode off, exact=True removes tau."""
        names = {f.name for f in fields(self)}
        if unknown := sorted(set(changes) - names):
            raise SessionError(f"unknown settings: {', '.join(unknown)} (known: {', '.join(sorted(names))})")
        if "tau" in changes and "exact" not in changes:
            changes["exact"] = None
        elif changes.get("exact") is True and "tau" not in changes:
            changes["tau"] = None
            if self.masks_of_tau:
                changes.setdefault("masks", "auto")
        if "masks" in changes:
            changes.setdefault("masks_of_tau", False)
        return replace(self, **changes)

    def with_profile(self, profile: GenerationConfig) -> GenerationConfig:
        """A copy with what a profile sets: tau, metric and masks."""
        return self.with_values(
            tau=profile.tau, metric=profile.metric, masks=profile.masks, masks_of_tau=True
        )


def repeatable(config: GenerationConfig, *, has_masks: bool, has_seed: bool = False) -> GenerationConfig:
    """`config` with all masks if its text would otherwise depend on measured costs: if it has a tau,
    no masks of the user's, and is sampled or has a seed. Exact mode does not depend on the number of masks.
    """
    has_tau = not config.exact and not config.one_token
    if has_tau and not has_masks and config.masks == "auto" and (has_seed or not config.is_greedy):
        return config.with_values(masks="full", masks_of_tau=True, tau=config.tau)
    return config
