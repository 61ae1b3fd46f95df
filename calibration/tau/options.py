"""The options of a calibration, and its candidates in their fixed order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

from ...runtime.accept import METRICS
from ...runtime.decode.config import GenerationConfig
from ...runtime.errors import CalibrationError
from ...runtime.rules import broken, integer, number
from ...runtime.terminal.options import comma_separated
from ..options import numbers

# From safe to fast, and fixed in advance: a sequence that depends on the tested rows would void the
# guarantee.
GRID: Mapping[str, tuple[float, ...]] = {
    "probability": (0.99, 0.97, 0.95, 0.93, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5),
    "margin": (0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.2),
    "entropy": (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.4),
}


def setting(tau: float, metric: str = "probability") -> GenerationConfig:
    """A setting with all masks, so that answers do not depend on the speed of the machine."""
    return GenerationConfig(tau=tau, metric=metric, masks="full")


ONE_TOKEN = setting(1.0)
BELOW_1 = math.nextafter(1, 0)
EXACT = GenerationConfig()  # the default; `masks` changes the speed but not the text


def name_of(config: GenerationConfig) -> str:
    """Different for different settings."""
    if config.exact:
        return "exact"
    if config.one_token:
        return "one token"
    return f"tau {config.tau:g}" if config.metric == "probability" else f"{config.metric} {config.tau:g}"


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """The goal: the fastest tau whose mean quality drop is below `max_drop` (0 to 1) with `confidence`. Each
    metric is tested at (1 - confidence) / their number. Raises CalibrationError with every bad value.

    max_drop: The largest acceptable mean quality loss against tau 1; 0.02 means two percentage points.
    confidence: Confidence level of the quality bound.
    guarantee: Whether the bound is shown for all requests, or only the mean drop of these rows counts.

    Rows and scores:
    limit: Use at most this many rows.

    Settings to compare:
    metrics: Confidence metrics to try, separated by commas; they share the error. By default probability.
    taus: Candidates of the only metric, from safe to fast, separated by commas.
    batch: Rows decoded together.
    """

    max_drop: Annotated[float, number("between 0 and 1 (0.02 is two points)", high=BELOW_1, above=True)] = (
        0.02
    )
    confidence: Annotated[float, number("0.5 or more, below 1", 0.5, BELOW_1)] = 0.95
    metrics: Annotated[tuple[str, ...], typer.Option("--compare", parser=comma_separated)] = ("probability",)
    taus: Annotated[tuple[float, ...], typer.Option(parser=numbers("--taus", float))] = ()
    limit: Annotated[int | None, integer(1, "1 or more")] = None
    batch: Annotated[int, integer(1, "1 or more")] = 1
    guarantee: bool = True

    def __post_init__(self) -> None:
        problems = list(broken(self).values())
        unknown = [m for m in self.metrics if m not in METRICS]
        if unknown or not self.metrics or len(set(self.metrics)) < len(self.metrics):
            names = ", ".join(self.metrics) or "none"
            problems.append(f"metrics must be distinct values of {', '.join(METRICS)}, not {names}")
        elif self.taus and len(self.metrics) > 1:
            problems.append("taus can be given for one metric only")
        elif self.taus and self._are_disordered():
            problems.append("taus must be numbers that allow more than one token a step, from safe to fast")
        if problems:
            raise CalibrationError("; ".join(problems), field="options")

    def _are_disordered(self) -> bool:
        falling = [-t for t in self.taus] if self.metrics[0] == "entropy" else list(self.taus)
        if not all(0 <= t < math.inf for t in self.taus) or falling != sorted(set(falling), reverse=True):
            return True
        return any(setting(tau, self.metrics[0]).one_token for tau in self.taus)

    @property
    def level(self) -> float:
        """The error probability of each metric's sequence."""
        return (1 - self.confidence) / len(self.metrics)

    @property
    def items_needed(self) -> int:
        """The fewest rows that can show the bound."""
        from . import bounds  # numpy

        return bounds.items_needed(self.max_drop, self.level)

    def candidates(self, metric: str) -> tuple[float, ...]:
        return self.taus or GRID[metric]
