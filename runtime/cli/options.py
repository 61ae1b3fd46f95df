"""Options that several commands share, as dataclasses, and the decorator that reads them."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import MarsError, MarsWarning
from ..terminal.console import text_of
from ..terminal.options import (
    Device,
    File,
    Level,
    MostBytes,
    ParseSpecial,
    Safe,
    Size,
    Strict,
    Threads,
    VariantName,
)

if TYPE_CHECKING:
    from ..decode.config import GenerationConfig, Masks
    from ..session.session import Session

X = typer.Option(metavar="X")
NotNegative = typer.Option(metavar="X", min=0.0)
Name = Annotated[str | None, typer.Option(metavar="NAME")]


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How answers are generated.

    system: System message.

    Decoding:
    exact: The text of one token a step, several tokens at a time. The default.
    tau: Accept predictions with at least this confidence, without verification. Lower is faster and
        riskier; the paper uses 0.95; 1 is one token a step.
    metric: Confidence that --tau is compared with: probability, margin (top-1 minus top-2) or entropy
        (nats). The last two need a bundle exported with --metrics.
    profile: Use tau, metric and masks of this calibrated profile.
    masks: Most mask slots of a step: auto (the default) tunes it for speed, full is as many as the bundle's
        block allows. In exact mode it never changes the text; with --tau, auto may give other texts in other
        runs.
    prompt_lookup: Prompt lookup: if the last N tokens occurred before, propose the text that followed them.
        Exact mode only; 0 is off.

    Sampling:
    temperature: 0 is greedy. Above 0 needs a bundle with logits. Also --temp.
    top_k: Sample from the K most likely tokens; 0 is off.
    top_p: Sample from the smallest set of tokens with this probability; 1 is off.
    min_p: Sample from tokens with at least this share of the highest probability; 0 is off.
    seed: Seed; 0 by default. The same command gives the same text: with --tau all masks are then used,
        unless --masks is given.
    repetition_penalty: Above 1 makes repetition less likely; 1 is off.

    Structured answers:
    schema: The answer is JSON that satisfies this JSON schema.
    regex: The answer matches this regular expression.
    choice: The answer is one of these texts. Repeatable.
    tools: The answer calls these functions: a JSON file in the form of OpenAI's API.
    """

    system: str | None = None
    exact: Annotated[bool | None, typer.Option("--exact")] = None
    tau: Annotated[float | None, NotNegative] = None
    metric: str | None = None
    profile: Name = None
    masks: Annotated[str | None, typer.Option(metavar="auto|full|N")] = None
    prompt_lookup: Annotated[int, typer.Option(metavar="N", min=0)] = 0
    temperature: Annotated[float, NotNegative] = 0.0
    top_k: Annotated[int, typer.Option(metavar="K", min=0)] = 0
    top_p: Annotated[float, X] = 1.0
    min_p: Annotated[float, X] = 0.0
    seed: Annotated[int | None, typer.Option(metavar="N", min=0)] = None
    repetition_penalty: Annotated[float, X] = 1.0
    schema: File = None
    regex: str | None = None
    choice: list[str] | None = None
    tools: File = None

    @property
    def has_masks(self) -> bool:
        return self.masks is not None or self.profile is not None

    def config(
        self, max_new_tokens: int, stop: tuple[str, ...] = (), grammar: str | None = None
    ) -> GenerationConfig:
        """The settings without those of a profile. Raises MarsError for options that exclude each other."""
        from ..decode.config import GenerationConfig

        return GenerationConfig(
            schema=text_of(self.schema), regex=self.regex, choice=tuple(self.choice) if self.choice else None,
            tools=text_of(self.tools), grammar=grammar,
            max_new_tokens=max_new_tokens, masks=_masks_of(self.masks), stop=stop,
            prompt_lookup=self.prompt_lookup,
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p,
            seed=self.seed or 0, repetition_penalty=self.repetition_penalty, **self._acceptance(),
        )  # fmt: skip

    def with_profile(self, session: Session, config: GenerationConfig) -> GenerationConfig:
        """`config` with the settings of the profile, and as repeatable as the seed requires."""
        from ..decode.config import repeatable

        if self.profile is not None:
            config = config.with_profile(session.profile(self.profile))
        return repeatable(config, has_masks=self.has_masks, has_seed=self.seed is not None)

    def _acceptance(self) -> dict[str, Any]:
        """The values of --exact, --tau and --metric, without unset ones."""
        options = (("exact", self.exact), ("tau", self.tau), ("metric", self.metric))
        values: dict[str, Any] = {name: value for name, value in options if value is not None}
        if self.profile is not None and (values or self.masks is not None):
            raise MarsError(
                "--profile sets exact, tau, metric and masks; use either --profile or these options"
            )
        if self.exact and self.tau is not None:
            raise MarsError(
                f"--exact verifies every token, --tau {self.tau:g} accepts likely ones without verification;"
                " use one of them"
            )
        if self.metric is not None and self.tau is None:
            raise MarsError(
                f"--metric {self.metric} is the confidence that --tau is compared with; give --tau"
            )
        if self.tau is not None and (warning := tau_warning(self.tau, self.metric)):
            warnings.warn(warning, MarsWarning, stacklevel=1)
        return values


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How a bundle is opened: arguments of Session.open.

    Model and device:
    cache_bytes: Memory of the prefix cache, such as 512M. By default a small share of free memory; 0 is off.
    prefix_dir: Keep entries of the prefix cache in this directory, for the next start. It has the prompts in
        clear.
    prefix_bytes: Most bytes of --prefix-dir; 4G by default.
    """

    device: Device = "cpu"
    variant: VariantName = None
    threads: Threads = None
    accuracy_level: Level = None
    cache_bytes: MostBytes = None
    prefix_dir: Annotated[Path | None, typer.Option(file_okay=False, metavar="DIR")] = None
    prefix_bytes: Annotated[int, typer.Option(show_default=False, **Size)] = 4 << 30
    safe: Safe = False
    strict: Strict = False
    parse_special: ParseSpecial = False

    def open(self, bundle: Path) -> Session:
        from ..session.session import Session

        return Session.open(bundle, **asdict(self))


def tau_warning(tau: float, metric: str | None) -> str:
    """A warning for a tau that no prediction can reach; empty for others. Entropy is in nats."""
    if tau <= 1 or metric == "entropy":
        return ""
    return f"tau {tau:g}: no {metric or 'probability'} is above 1, so each step accepts one token, as with 1"


def _masks_of(masks: str | None) -> Masks:
    if masks is None or masks == "auto":
        return "auto"
    if masks == "full":
        return "full"
    if not (masks.isascii() and masks.isdecimal() and len(masks) < 10):
        raise typer.BadParameter(f"auto, full or a number of 0 or more, not {masks!r}", param_hint="--masks")
    return int(masks)
