"""Options that several commands share, as dataclasses."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..decode.config import GenerationConfig
from ..errors import MarsWarning
from ..terminal.options import (
    Device,
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
    from ..session.session import Session

Settings = Annotated[dict[str, Any], GenerationConfig]
"""The settings of answers that are given."""


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How answers are generated, beside the settings of a GenerationConfig.

    system: System message.

    Decoding:
    profile: Use tau, metric and masks of this calibrated profile.
    """

    system: str | None = None
    profile: Annotated[str | None, typer.Option(metavar="NAME")] = None

    def config(self, session: Session, settings: dict[str, Any]) -> GenerationConfig:
        """Raises SessionError for settings that exclude each other."""
        config = session.config(self.profile, **settings)
        if config.tau is not None and (warning := tau_warning(config.tau, config.metric)):
            warnings.warn(warning, MarsWarning, stacklevel=1)
        return config


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How a bundle is opened: arguments of Session.open.

    Model and device:
    cache_bytes: Memory of the prefix cache, such as 512M. By default a small share of free memory; 0 is off.
    prefix_dir: Keep entries of the prefix cache in this directory, for the next start. It has the prompts in
        clear.
    prefix_bytes: Maximum bytes of --prefix-dir; 4G by default.
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
