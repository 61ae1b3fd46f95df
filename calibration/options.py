"""The options of `calibrate` and `bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ..runtime.decode.config import GenerationConfig, Masks
from ..runtime.errors import CalibrationError, MarsError
from ..runtime.rules import broken, integer
from ..runtime.terminal.options import Device, Level, at_most_cores, comma_separated

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """The rows of a task, and where they are decoded.

    Rows and scores:
    score: Score of rows that name none: a known one, or your own as module:function.
    schema: A JSON schema for the answers of rows without a form of their own; `assistant`: the built-in
        schema of its 25 tools.
    """

    score: str | None = None
    schema: Annotated[str | None, typer.Option(metavar="FILE")] = None
    device: Device = "cpu"
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            metavar="N",
            min=1,
            callback=at_most_cores,
            help="Compute threads; the backend decides by default. Here -t is the task.",
        ),
    ] = None
    accuracy_level: Level = None


@dataclass(frozen=True, kw_only=True)
class StateOptions:
    """A calibration's profile, and where its report and state are kept.

    name: Name of the profile; by default the task's.
    store: Whether to store the profile in the bundle.

    The run:
    output: Folder of the report and the state; by default named after task and bundle.
    resume: Continue an earlier run from its state in the output folder.
    force: Discard the state of an earlier run.
    """

    name: str | None = None
    store: bool = True
    output: Annotated[Path | None, typer.Option("--output", "-o")] = None
    resume: bool = False
    force: bool = False


def numbers(name: str, kind: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """A parser of an option's numbers, separated by commas. It raises MarsError for other values."""

    def parse(text: str) -> tuple[T, ...]:
        try:
            return tuple(kind(word) for word in comma_separated(text))
        except ValueError as error:
            kinds = "whole numbers" if kind is int else "numbers"
            what = f"{name} must be {kinds} separated by commas, not {text!r}"
            raise MarsError(what, field=name) from error

    return parse


def _masks(text: str) -> tuple[Masks, ...]:
    """The values of --masks. BenchOptions checks them."""
    return tuple(int(word) if word.isdecimal() else word for word in comma_separated(text))  # type: ignore[misc]


Count = Annotated[int, integer(1, "1 or more")]
MIN_ROWS = 16
WAVES = 4  # rows of a slice, as a multiple of the largest batch; with fewer, a batch is seldom full


@dataclass(frozen=True, slots=True)
class Setting:
    """Rows at once, a tau (None: exact mode), and the masks. Raises MarsError for invalid values."""

    batch: Count
    tau: float | None = 1.0
    masks: Masks = "auto"

    def __post_init__(self) -> None:
        if wrong := broken(self):
            raise CalibrationError("; ".join(wrong.values()), field=next(iter(wrong)))
        self.config(1)

    @property
    def one_token(self) -> bool:
        """One-token mode, with which the others at the same batch are compared."""
        return self.config(1).one_token

    @property
    def mode(self) -> str:
        """How tokens are accepted: exact, or the tau."""
        return "exact" if self.tau is None else f"tau {self.tau:g}"

    def config(self, max_new_tokens: int) -> GenerationConfig:
        return GenerationConfig(max_new_tokens=max_new_tokens, tau=self.tau, masks=self.masks)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The compared settings: every tau and number of masks at every batch, one-token mode and, with `exact`,
    exact mode at every number of masks. Raises CalibrationError that lists every bad value.

    Rows and scores:
    limit: Use at most this many rows: by default 16, or four times the largest batch.

    The run:
    rounds: How often each setting decodes the rows.

    Settings to compare:
    exact: Whether to compare exact mode, too.
    taus: Taus to compare with one-token mode, separated by commas.
    batches: Rows decoded at once, separated by commas: 1 by default.
    masks: Most predictions of a step, separated by commas: auto (the default), full, or numbers.
    """

    taus: tuple[float, ...] = (0.95,)
    batches: Annotated[tuple[int, ...], typer.Option("--batch", parser=numbers("--batch", int))] = (1,)
    masks: Annotated[tuple[Masks, ...], typer.Option(parser=_masks)] = ("auto",)
    rounds: Count = 3
    limit: Annotated[int | None, integer(1, "1 or more")] = None
    exact: bool = True

    def __post_init__(self) -> None:
        lists: dict[str, tuple[object, ...]] = {"batch": self.batches, "masks": self.masks}
        if not self.exact:  # exact mode alone can be compared with one-token mode
            lists["tau"] = self.taus
        problems = [f"give at least one {name}" for name, values in lists.items() if not values]
        # One value at a time, so that each bad value is named once.
        problems += _refusals(lambda batch: Setting(batch), self.batches)
        problems += _refusals(lambda tau: Setting(1, tau=tau), self.taus)
        problems += _refusals(lambda masks: Setting(1, masks=masks), self.masks)
        problems += broken(self).values()
        if problems:
            raise CalibrationError("; ".join(dict.fromkeys(problems)), field="options")

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Every setting once: at each batch one-token mode first, then exact mode."""
        settings: list[Setting] = []
        for batch in self.batches:
            settings.append(Setting(batch))
            settings += [Setting(batch, None, masks) for masks in self.masks if self.exact]
            taus = [Setting(batch, tau, masks) for masks, tau in product(self.masks, self.taus)]
            settings += [setting for setting in taus if not setting.one_token]
        return tuple(dict.fromkeys(settings))

    @property
    def slice_rows(self) -> int:
        """Rows that a setting decodes before the next setting."""
        return max(MIN_ROWS, WAVES * max(self.batches))


def _refusals(make: Callable[[Any], object], values: tuple[Any, ...]) -> Iterator[str]:
    for value in values:
        try:
            make(value)
        except MarsError as error:
            yield str(error)
