"""Options of generate and chat: what is asked of answers, and where they are computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ..errors import MarsError
from .console import Device, Level, Metric, ParseSpecial, Safe, Strict, Threads, VariantName, text_of

if TYPE_CHECKING:
    from ..decode.config import GenerationConfig, Window
    from ..session.session import Session

Tau = Annotated[
    float | None,
    typer.Option(
        "--tau",
        metavar="X",
        min=0.0,
        help="Accept what is likelier than this, faster and riskier than --exact (0.95 in the paper); 1 is"
        " one token per forward.",
    ),
]
Exact = Annotated[
    bool | None,
    typer.Option(
        "--exact",
        help="Several tokens a step, with exactly the text of one-token decoding. The default, unless --tau"
        " is given.",
    ),
]
Lookup = Annotated[
    int,
    typer.Option(
        "--lookup",
        min=0,
        metavar="N",
        help="Propose, too, what followed the last N tokens when they stood there before (exact mode); 0 is"
        " off.",
    ),
]
ProfileName = Annotated[
    str | None,
    typer.Option("--profile", help="Take tau, metric and window from this calibrated profile of the bundle."),
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        metavar="X",
        min=0.0,
        help="0 is greedy. Above 0 needs a bundle exported with --logits. --temp is the same.",
    ),
]
TopK = Annotated[int, typer.Option(metavar="N", min=0, help="Draw from the k likeliest tokens; 0 is off.")]
TopP = Annotated[
    float, typer.Option(help="Draw from the smallest set of tokens with this probability; 1 is off.")
]
MinP = Annotated[
    float,
    typer.Option("--min-p", help="Draw from tokens at least this much as likely as the likeliest; 0 is off."),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="Seed of the draws, 0 by default. The same command gives the same text: at a tau the window is"
        " then `full`, unless --window is given; `auto` follows measured times.",
    ),
]
Penalty = Annotated[
    float, typer.Option("--repetition-penalty", help="Above 1 makes repetition less likely; 1 is off.")
]
WindowOption = Annotated[
    str | None,
    typer.Option(
        "--window",
        metavar="auto|full|N",
        help="Predictions of new positions in one step: auto (the default) chooses for speed, step by step;"
        " full is the bundle's block. Exact mode gives one text for all of them; at a tau, auto may give"
        " another one in another run.",
    ),
]
CacheBytes = Annotated[
    int | None,
    typer.Option(
        "--cache-bytes",
        metavar="N",
        min=0,
        help="Memory for KV entries of texts that were read before: by default a small share of what is free;"
        " 0 is none.",
    ),
]
System = Annotated[str | None, typer.Option(help="A system message before the conversation.")]
Schema = Annotated[
    Path | None,
    typer.Option(
        "--schema", exists=True, dir_okay=False, help="The answer is JSON that satisfies this schema."
    ),
]
Regex = Annotated[str | None, typer.Option("--regex", help="The answer matches this regular expression.")]
Choice = Annotated[
    list[str] | None, typer.Option("--choice", help="The answer is one of these; given several times.")
]
Tools = Annotated[
    Path | None,
    typer.Option(
        "--tools", exists=True, dir_okay=False, help="The answer calls these functions (JSON, OpenAI's form)."
    ),
]


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What is asked of answers."""

    system: System = None
    exact: Exact = None
    tau: Tau = None
    metric: Metric = None
    profile: ProfileName = None
    window: WindowOption = None
    lookup: Lookup = 0
    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    seed: Seed = None
    repetition_penalty: Penalty = 1.0
    schema: Schema = None
    regex: Regex = None
    choice: Choice = None
    tools: Tools = None

    @property
    def has_window(self) -> bool:
        return self.window is not None or self.profile is not None

    def config(
        self, max_new_tokens: int, stop: tuple[str, ...] = (), grammar: str | None = None
    ) -> GenerationConfig:
        """The settings, but for those of a profile. Raises MarsError for what excludes each other."""
        from ..decode.config import GenerationConfig

        return GenerationConfig(
            schema=text_of(self.schema), regex=self.regex, choice=tuple(self.choice) if self.choice else None,
            tools=text_of(self.tools), grammar=grammar,
            max_new_tokens=max_new_tokens, window=_window_of(self.window), lookup=self.lookup, stop=stop,
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p,
            seed=self.seed or 0, repetition_penalty=self.repetition_penalty,
            **_knob(self.profile, self.exact, self.tau, self.metric, self.window),
        )  # fmt: skip

    def settled(self, session: Session, config: GenerationConfig) -> GenerationConfig:
        """The same with those of the profile, and as repeatable as a seed asks for."""
        from ..decode.config import repeatable

        config = _profiled(session, self.profile, config)
        return repeatable(config, has_window=self.has_window, has_seed=self.seed is not None)


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Where answers are computed."""

    device: Device = "cpu"
    variant: VariantName = None
    threads: Threads = None
    accuracy_level: Level = None
    cache_bytes: CacheBytes = None
    safe: Safe = False
    strict: Strict = False
    parse_special: ParseSpecial = False

    def open(self, bundle: Path) -> Session:
        from ..session.session import Session

        return Session.open(
            bundle, self.device, threads=self.threads, variant=self.variant,
            accuracy_level=self.accuracy_level, cache_bytes=self.cache_bytes,
            safe=self.safe, strict=self.strict,
            parse_special=self.parse_special,
        )  # fmt: skip


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command as typer reads it, of one that has dataclasses among its parameters: each stands for the
    options that are its fields.
    """
    hints = get_type_hints(command, include_extras=True)
    sets: dict[str, type[Any]] = {n: k for n, k in hints.items() if isinstance(k, type) and is_dataclass(k)}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name in sets:
            kinds = get_type_hints(sets[name], include_extras=True)
            for field in fields(sets[name]):
                own = Parameter(
                    field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=kinds[field.name]
                )
                parameters.append(own)
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))

    def run(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)})
            for name, kind in sets.items()
        }
        command(**given, **made)

    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return run


def _window_of(window: str | None) -> Window:
    """The value of --window: a word, or a number of 1 or more."""
    if window is None or window == "auto":
        return "auto"
    if window == "full":
        return "full"
    if not (window.isascii() and window.isdecimal() and len(window) < 10 and int(window) >= 1):
        raise typer.BadParameter(
            f"auto, full or a number of 1 or more, not {window!r}", param_hint="--window"
        )
    return int(window)


def _knob(
    profile: str | None, exact: bool | None, tau: float | None, metric: str | None, window: str | None
) -> dict[str, Any]:
    """Exact, or the settings of tau that were given; they and a profile exclude each other."""
    settings = (("exact", exact), ("tau", tau), ("metric", metric))
    given: dict[str, Any] = {name: value for name, value in settings if value is not None}
    if profile is not None and (given or window is not None):
        raise MarsError("a profile sets tau, metric and window; give --profile, or them, not both")
    if exact and tau is not None:
        raise MarsError(
            f"--exact gives the one-token text whatever is likely, --tau {tau:g} accepts what is likely;"
            " give one of them"
        )
    if metric is not None and tau is None:
        raise MarsError(f"--metric {metric} says what tau is compared with; give --tau, too")
    return given


def _profiled(session: Session, profile: str | None, config: GenerationConfig) -> GenerationConfig:
    if profile is None:
        return config
    found = session.profile(profile)
    return config.with_values(tau=found.tau, metric=found.metric, window=found.window)
