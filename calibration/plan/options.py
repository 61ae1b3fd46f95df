"""What a plan is asked for: the load, the bound, and what to choose from. Runs nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...runtime.accept import METRICS
from ...runtime.bundle.profiles import described, find
from ...runtime.decode.schedule import Limits
from ...runtime.errors import CalibrationError
from ...runtime.session import Session
from .fleet import BALANCES, Balance
from .work import Mode

BATCHES = (1, 2, 4, 8)
MOST_REPLICAS = 1000


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Requests at `rate` a second, or as `trace` has them, of which 95 in 100 are to be whole within `p95`
    seconds. `modes` and `batches` are what there is to choose from, no modes for exact mode and the bundle's
    profiles; `replicas` asks what so many do. Raises CalibrationError that lists every bad value.

    `requests` are simulated in each of `draws` draws of arrivals, more where there are many replicas.
    """

    p95: float
    rate: float | None = None
    trace: Path | None = None
    modes: tuple[str, ...] = ()
    batches: tuple[int, ...] = BATCHES
    replicas: int | None = None
    max_replicas: int = 100
    balance: Balance = "random"
    prefill_tokens: int = Limits().prefill_tokens
    requests: int = 2000
    draws: int = 3
    seed: int = 0
    limit: int = 48  # rows of the task that are recorded

    def __post_init__(self) -> None:
        problems = []
        if (self.rate is None) == (self.trace is None):
            problems.append("give a rate or a trace, one of them")
        if self.rate is not None and not (0 < self.rate < math.inf):
            problems.append(f"the rate must be above 0, not {self.rate:g} requests a second")
        if not 0 < self.p95 < math.inf:
            problems.append(f"p95 must be above 0, not {self.p95:g} s")
        if not self.batches or any(not 1 <= b <= 512 for b in self.batches):
            problems.append(f"batches must be of 1 to 512 rows, not {', '.join(map(str, self.batches))}")
        if self.balance not in BALANCES:
            problems.append(f"balance must be one of {', '.join(BALANCES)}, not {self.balance!r}")
        counts = {"max_replicas": self.max_replicas, "replicas": self.replicas or 1}
        problems += [
            f"{name} must be from 1 to {MOST_REPLICAS}, not {count}"
            for name, count in counts.items()
            if not 1 <= count <= MOST_REPLICAS
        ]
        least = {"requests": 100, "draws": 1, "limit": 1, "prefill_tokens": 1}
        problems += [
            f"{name} must be {few} or more, not {getattr(self, name)}"
            for name, few in least.items()
            if getattr(self, name) < few
        ]
        if problems:
            raise CalibrationError("\n".join(problems))


def modes_of(session: Session, words: Sequence[str]) -> list[Mode]:
    """`exact`, `one-token`, `tau=N`, `METRIC=N` or `profile=NAME`, as words; without any, exact mode and the
    profiles that can be used."""
    if not words:
        known = [d.profile for d in described(session.bundle.path) if not d.stale]
        own = [p for p in known if p.variant == session.variant.name]
        return [
            Mode("exact", True),
            *(Mode(f"{p.name} ({_bound(p.tau, p.metric)})", False, p.tau, p.metric) for p in own),
        ]
    return [_mode(session, word) for word in dict.fromkeys(words)]


def _mode(session: Session, word: str) -> Mode:
    name, _, value = word.partition("=")
    metric = "probability" if name == "tau" else name
    if word == "exact":
        return Mode("exact", True)
    if word == "one-token":
        return Mode("one token", False)
    if name == "profile" and value:
        p = find(session.bundle, session.variant, value)
        return Mode(f"{p.name} ({_bound(p.tau, p.metric)})", False, p.tau, p.metric)
    try:
        tau = float(value)
    except ValueError:
        tau = math.nan
    if metric in METRICS and math.isfinite(tau) and tau >= 0:
        return Mode(_bound(tau, metric), False, tau, metric)
    raise CalibrationError(f"{word!r} is no mode; exact, one-token, tau=N, margin=N, entropy=N, profile=NAME")


def _bound(tau: float, metric: str) -> str:
    return f"tau {tau:g}" if metric == "probability" else f"{metric} {tau:g}"
