"""What a check found, and the list of all of them. Checks nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

State = Literal["passed", "failed", "not run"]


class NotHere(Exception):
    """A check that has nothing to look at here: the bundle lacks what it is about, or the machine does."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a check says: whether all is right, in a sentence, with its figures."""

    good: bool
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A check that was made. `title` says what it is about, `seconds` how long it took."""

    name: str
    title: str
    state: State
    detail: str
    figures: dict[str, Any]
    seconds: float


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All checks of a bundle on a device."""

    bundle: str
    variant: str
    precision: str
    block: int
    device: str
    device_name: str
    versions: dict[str, str]
    date: str
    outcomes: tuple[Outcome, ...]

    @property
    def is_good(self) -> bool:
        """Whether nothing failed. Checks that were not run are no failures, and no proof."""
        return all(outcome.state != "failed" for outcome in self.outcomes)

    @property
    def headline(self) -> str:
        counts = {
            state: sum(o.state == state for o in self.outcomes) for state in ("passed", "failed", "not run")
        }
        words = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        return f"{self.bundle} on {self.device_name}: {words}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"good": self.is_good}


def table(outcomes: Sequence[Outcome]) -> list[tuple[str, str, str]]:
    """A row of cells for each: name, state, what it found."""
    return [(outcome.name, outcome.state, outcome.detail) for outcome in outcomes]
